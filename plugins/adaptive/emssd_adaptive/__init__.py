"""Plugin `budget=adaptive`: drafts as much as is expected to pay, row by row and step by step, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from emssd.drafting import BudgetPolicy
from emssd.errors.ranges import AtLeastOne, Meta
from emssd.hooks import BudgetSpec, offering

__all__ = ["AdaptiveConfig"]


@dataclass
class AdaptiveConfig:
    """Options of `budget=adaptive`.

    Attributes:
        memory: about how many drafted tokens of a row its estimate of acceptance looks back on.
        probe_interval: after so many steps without a draft, some rows draft once more to see whether it pays by now;
            after a quarter as many steps with drafts, one step goes without, to compare. Both take at most 0.5 % of
            the time; where they would take more, they wait longer.
    """

    memory: Annotated[float, Meta(ge=1)] = 16.0
    probe_interval: AtLeastOne = 32


def _build(config: AdaptiveConfig) -> BudgetPolicy:
    from emssd_adaptive.policy import AdaptiveBudget

    return AdaptiveBudget(memory=config.memory, probe_interval=config.probe_interval)


emssd_budget_policies = offering(BudgetSpec("adaptive", AdaptiveConfig, _build))
