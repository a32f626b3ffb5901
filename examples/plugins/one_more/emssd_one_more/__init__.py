"""Plugin `budget=one_more`: lets each row draft one token more than it had accepted in its last step."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import BudgetPolicy
from emssd.hooks import BudgetSpec, hookimpl

__all__ = ["OneMoreConfig", "emssd_budget_policies"]


@dataclass
class OneMoreConfig:
    """Options of `budget=one_more`.

    Attributes:
        first: tokens that a row may draft as long as nothing is known of it.
    """

    first: int = 4


def _build(config: OneMoreConfig) -> BudgetPolicy:
    from emssd_one_more.policy import OneMoreBudget

    return OneMoreBudget(config)


@hookimpl
def emssd_budget_policies() -> list[BudgetSpec]:
    """Offer the policy."""
    return [BudgetSpec("one_more", OneMoreConfig, _build)]
