"""Lossless speculative decoding of a batch, for unmodified Hugging Face causal language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emssd.engine import Engine
    from emssd.generation import Generation
    from emssd.hf import custom_generate

__all__ = ["Engine", "Generation", "__version__", "custom_generate"]

__version__ = "0.1.0"

_HOMES = {"Engine": "emssd.engine", "Generation": "emssd.generation", "custom_generate": "emssd.hf"}


def __getattr__(name: str) -> Any:
    """Import torch and friends only when something that needs them is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'emssd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
