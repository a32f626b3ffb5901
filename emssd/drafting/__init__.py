"""Drafting: the `Drafter` and `BudgetPolicy` interfaces, and the stages that ask them in every step."""

from emssd.drafting.budget import BudgetPolicy, BudgetStep, DraftedNode, GoesOn
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.context import DrafterContext
from emssd.drafting.draft import Draft, DraftExtra, Outcome, joined_trees
from emssd.drafting.drafter import Drafter
from emssd.drafting.growth import Tree, grow_tree
from emssd.drafting.hidden import HiddenStates
from emssd.drafting.lookup import LookupDrafter, Occurrence
from emssd.drafting.ngrams import NGramDrafter
from emssd.metrics.stats import StageStats, StepStats

__all__ = [
    "BudgetPolicy",
    "BudgetStep",
    "CheckedDrafter",
    "Draft",
    "DraftExtra",
    "DraftedNode",
    "Drafter",
    "DrafterContext",
    "GoesOn",
    "HiddenStates",
    "LookupDrafter",
    "NGramDrafter",
    "Occurrence",
    "Outcome",
    "StageStats",
    "StepStats",
    "Tree",
    "grow_tree",
    "joined_trees",
]
