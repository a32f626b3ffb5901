"""Drafters that plugins build on: a causal model with a KV cache of its own drafts for the whole batch."""

from emssd.drafters.base import CachedRow, ModelDrafter
from emssd.drafters.shallow import shallow_runner
from emssd.drafters.trees import Level, TreeDrafter

__all__ = ["CachedRow", "Level", "ModelDrafter", "TreeDrafter", "shallow_runner"]
