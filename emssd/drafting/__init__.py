"""Drafting: the `Drafter` and `BudgetPolicy` interfaces, and the stages that ask them in every step."""

from emssd.drafting.budget import BudgetPolicy, BudgetStep
from emssd.drafting.context import DrafterContext
from emssd.drafting.draft import Draft, Outcome
from emssd.drafting.drafter import Drafter
from emssd.metrics.stats import StageStats, StepStats

__all__ = ["BudgetPolicy", "BudgetStep", "Draft", "Drafter", "DrafterContext", "Outcome", "StageStats", "StepStats"]
