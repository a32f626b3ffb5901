"""Drafters that plugins build on: a causal model with a KV cache of its own drafts for the whole batch."""

from emssd.drafters.base import CachedRow, ModelDrafter
from emssd.drafters.loading import load_draft_model
from emssd.drafters.trees import Level, TreeDrafter

__all__ = ["CachedRow", "Level", "ModelDrafter", "TreeDrafter", "load_draft_model"]
