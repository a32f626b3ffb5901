"""Drafters that plugins build on: a model, or a trained head, drafts chains or token trees for the whole batch.

A plugin with an EAGLE head of its own has a `PairedHead`, reads its files with `HeadFiles`, and returns a
`PairedDrafter`. Other drafters are subclasses of `ModelDrafter`, `StatesDrafter` or `SlotDrafter`.
"""

from emssd.decoding.packing import pack, pack_nodes
from emssd.drafters.draft_cache import DraftCache, HeadRunner, fed
from emssd.drafters.heads.config import DecoderConfig
from emssd.drafters.heads.files import Checkpoint
from emssd.drafters.heads.formats import Format
from emssd.drafters.heads.head import LayerHead
from emssd.drafters.heads.layers import Angles, Attend, HeadLayer, HeadNorm, Rotary, rotated
from emssd.drafters.heads.loading import HeadFiles, Loaded, TargetWeights
from emssd.drafters.heads.options import HeadTreeOptions, LayerTreeOptions, TreeKind, TreeOptions, shape_of
from emssd.drafters.heads.target import LAST_NORMED, Embed, Project, TargetSizes
from emssd.drafters.heads.weights import keep_bytes
from emssd.drafters.levels import GrowingRow, Level, LevelDrafter, SlotDrafter, nodes_of
from emssd.drafters.models import ModelDrafter, load_draft_model, shallow_runner
from emssd.drafters.paired import PairedDrafter, PairedHead
from emssd.drafters.shared import SharedDrafter
from emssd.drafters.states import StatesDrafter
from emssd.drafting.levels import GrowingTree
from emssd.drafting.shapes import DynamicShape, Expansion, Shape, StaticShape
from emssd.sampling.choice import Node

__all__ = [
    "LAST_NORMED",
    "Angles",
    "Attend",
    "Checkpoint",
    "DecoderConfig",
    "DraftCache",
    "DynamicShape",
    "Embed",
    "Expansion",
    "Format",
    "GrowingRow",
    "GrowingTree",
    "HeadFiles",
    "HeadLayer",
    "HeadNorm",
    "HeadRunner",
    "HeadTreeOptions",
    "LayerHead",
    "LayerTreeOptions",
    "Level",
    "LevelDrafter",
    "Loaded",
    "ModelDrafter",
    "Node",
    "PairedDrafter",
    "PairedHead",
    "Project",
    "Rotary",
    "Shape",
    "SharedDrafter",
    "SlotDrafter",
    "StatesDrafter",
    "StaticShape",
    "TargetSizes",
    "TargetWeights",
    "TreeKind",
    "TreeOptions",
    "fed",
    "keep_bytes",
    "load_draft_model",
    "nodes_of",
    "pack",
    "pack_nodes",
    "rotated",
    "shallow_runner",
    "shape_of",
]
