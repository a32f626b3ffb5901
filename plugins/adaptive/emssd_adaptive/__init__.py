"""Plugin `budget=adaptive`: drafts as much as is expected to pay, row by row and step by step, or nothing."""

from dataclasses import dataclass

from emssd.hooks import BudgetSpec, offering
from emssd_adaptive.policy import AdaptiveBudget

__all__ = ["AdaptiveConfig"]


@dataclass
class AdaptiveConfig:
    """`budget=adaptive` has no options."""


emssd_budget_policies = offering(BudgetSpec("adaptive", AdaptiveConfig, lambda _: AdaptiveBudget()))
