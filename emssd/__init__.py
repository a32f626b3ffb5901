"""Lossless speculative decoding of a batch, for unmodified Hugging Face causal language models."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emssd.decoding.engine import Engine
    from emssd.integrations.continuous_batching import speculate
    from emssd.integrations.custom_generate import custom_generate
    from emssd.sampling import SamplingParams
    from emssd.sequences import Generation

__all__ = ["Engine", "Generation", "SamplingParams", "__version__", "custom_generate", "speculate"]

__version__ = version("emssd")

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who runs the program says where messages go

_HOMES = {
    "demo": "emssd.data",
    "Engine": "emssd.decoding.engine",
    "Generation": "emssd.sequences.generation",
    "SamplingParams": "emssd.sampling",
    "custom_generate": "emssd.integrations.custom_generate",
    "speculate": "emssd.integrations.continuous_batching",
}


def __getattr__(name: str) -> Any:
    """Import torch and friends only when something that needs them is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'emssd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
