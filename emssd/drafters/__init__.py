"""Drafters that plugins build on: a model, or a trained head, drafts chains or token trees for the whole batch.

A plugin with an EAGLE head of its own has a `PairedHead`, reads its files with `HeadFiles`, and returns a
`PairedDrafter`. Other drafters are subclasses of `ModelDrafter`, `StatesDrafter` or `SlotDrafter`.
"""

from emssd.drafters.lanes import HeadLane, Lane
from emssd.drafters.levels import GrowingRow, LevelDrafter, SlotDrafter, nodes_of
from emssd.drafters.loading import check_vocabulary, load_draft_model, same_vocabulary, shallow_runner
from emssd.drafters.models import ModelDrafter
from emssd.drafters.paired import PairedDrafter
from emssd.drafters.shared import SharedDrafter
from emssd.drafters.states import StatesDrafter
from emssd.drafting.levels import GrowingTree
from emssd.drafting.shapes import DynamicShape, Shape
from emssd.heads import (
    Checkpoint,
    DecoderConfig,
    Format,
    Head,
    HeadFiles,
    HeadLayer,
    HeadNorm,
    Loaded,
    Rotary,
    TargetSizes,
)
from emssd.heads.lent import Lent
from emssd.heads.options import TreeKind, TreeOptions, shape_of
from emssd.heads.pairs import PairedHead
from emssd.sampling.choice import Node

__all__ = [
    "Checkpoint",
    "DecoderConfig",
    "DynamicShape",
    "Format",
    "GrowingRow",
    "GrowingTree",
    "Head",
    "HeadFiles",
    "HeadLane",
    "HeadLayer",
    "HeadNorm",
    "Lane",
    "Lent",
    "LevelDrafter",
    "Loaded",
    "ModelDrafter",
    "Node",
    "PairedDrafter",
    "PairedHead",
    "Rotary",
    "Shape",
    "SharedDrafter",
    "SlotDrafter",
    "StatesDrafter",
    "TargetSizes",
    "TreeKind",
    "TreeOptions",
    "check_vocabulary",
    "load_draft_model",
    "nodes_of",
    "same_vocabulary",
    "shallow_runner",
    "shape_of",
]
