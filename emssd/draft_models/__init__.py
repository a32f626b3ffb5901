"""Drafters that plugins build on: a model drafts chains or trees for a batch, with a KV cache of its own."""

from emssd.decoding.packing import pack, pack_nodes
from emssd.draft_models.draft_cache import DraftCache, fed
from emssd.draft_models.growing_tree import GrowingRow, GrowingTree, Level, nodes_of
from emssd.draft_models.level_drafter import LevelDrafter
from emssd.draft_models.models import ModelDrafter, SharedDrafter, load_draft_model, shallow_runner
from emssd.draft_models.shapes import DynamicShape, Expansion, LayerTreeOptions, Shape, StaticShape
from emssd.draft_models.slot_drafter import SlotDrafter
from emssd.sampling.choice import Node

__all__ = [
    "DraftCache",
    "DynamicShape",
    "Expansion",
    "GrowingRow",
    "GrowingTree",
    "LayerTreeOptions",
    "Level",
    "LevelDrafter",
    "ModelDrafter",
    "Node",
    "Shape",
    "SharedDrafter",
    "SlotDrafter",
    "StaticShape",
    "fed",
    "load_draft_model",
    "nodes_of",
    "pack",
    "pack_nodes",
    "shallow_runner",
]
