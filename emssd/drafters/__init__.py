"""Drafters that plugins build on: a causal model with a KV cache of its own drafts for the whole batch."""

from emssd.drafters.base import CachedRow, ModelDrafter
from emssd.drafters.loading import load_draft_model
from emssd.drafters.parallel import Chain, joined_chains, parallel_chains
from emssd.drafters.shallow import shallow_runner
from emssd.drafters.trees import Level, TreeDrafter

__all__ = [
    "CachedRow",
    "Chain",
    "Level",
    "ModelDrafter",
    "TreeDrafter",
    "joined_chains",
    "load_draft_model",
    "parallel_chains",
    "shallow_runner",
]
