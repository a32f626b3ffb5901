"""Drafting: the `Drafter` and `BudgetPolicy` interfaces, and the stages that ask them in every step."""

from emssd.drafting.budget import BudgetPolicy
from emssd.drafting.context import DrafterContext
from emssd.drafting.draft import Draft, Outcome
from emssd.drafting.drafter import Drafter
from emssd.drafting.lookup import LookupDrafter, Occurrence

__all__ = ["BudgetPolicy", "Draft", "Drafter", "DrafterContext", "LookupDrafter", "Occurrence", "Outcome"]
