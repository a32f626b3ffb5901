"""Plugin `budget=adaptive`: drafts as much as is expected to pay, row by row and step by step, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import BudgetPolicy
from emssd.hooks import BudgetSpec, offering

__all__ = ["AdaptiveConfig"]


@dataclass
class AdaptiveConfig:
    """`budget=adaptive` has no options."""


def _build(config: AdaptiveConfig) -> BudgetPolicy:
    from emssd_adaptive.policy import AdaptiveBudget

    return AdaptiveBudget()


emssd_budget_policies = offering(BudgetSpec("adaptive", AdaptiveConfig, _build))
