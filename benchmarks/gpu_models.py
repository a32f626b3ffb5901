"""Models for the GPU benchmark: real OPT shapes with random weights, made so that their greedy text is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from emssd.model.random_weights import counted_on, counting_model

__all__ = ["SHAPES", "Shape", "continuation", "opt_model"]


@dataclass(frozen=True)
class Shape:
    """Numbers of an OPT model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = 50272


SHAPES = {
    "opt-2.7b": Shape(2560, 32, 32),
    "opt-6.7b": Shape(4096, 32, 32),
    "opt-13b": Shape(5120, 40, 40),
    "tiny": Shape(64, 2, 4, vocab_size=512),
}


def opt_model(shape: Shape, dtype: torch.dtype, device: torch.device, max_model_len: int) -> Any:
    """An OPT model that counts on; see `emssd.model.random_weights.counting_model`."""
    architecture = {
        "model_type": "opt",
        "hidden_size": shape.hidden_size,
        "word_embed_proj_dim": shape.hidden_size,
        "ffn_dim": 4 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max(max_model_len, 2048),
    }
    return counting_model(architecture, dtype, device)


def continuation(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The tokens that an `opt_model` generates after `prompt`."""
    return counted_on(prompt[-1], count, vocab_size)
