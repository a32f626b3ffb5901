"""Drafters that plugins build on: a model or a trained head with a KV cache of its own drafts for the whole batch."""

from emssd.drafters.lanes import HeadLane, Lane, fed
from emssd.drafters.levels import GrowingRow, Level, LevelDrafter, SlotDrafter, nodes_of, pack_level
from emssd.drafters.loading import load_draft_model, shallow_runner
from emssd.drafters.models import ModelDrafter
from emssd.drafters.paired import PairedDrafter
from emssd.drafters.states import StatesDrafter

__all__ = [
    "GrowingRow",
    "HeadLane",
    "Lane",
    "Level",
    "LevelDrafter",
    "ModelDrafter",
    "PairedDrafter",
    "SlotDrafter",
    "StatesDrafter",
    "fed",
    "load_draft_model",
    "nodes_of",
    "pack_level",
    "shallow_runner",
]
