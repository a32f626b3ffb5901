"""Models for the GPU benchmark: real shapes with random weights, made so that their greedy text is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from emssd.model.load.random_weights import counted_on, counting_model

__all__ = ["SHAPES", "continuation", "model_of_shape"]


def _opt(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int = 50272) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "vocab_size": vocab_size,
    }


def _grouped(model_type: str, num_layers: int, intermediate_size: int, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": 4096,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocab_size,
    }


SHAPES = {
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "llama-3-8b": _grouped("llama", 32, 14336, 128256),
    "qwen3-8b": _grouped("qwen3", 36, 12288, 151936),
    "tiny": _opt(64, 2, 4, vocab_size=512),
}
"""Configs of Transformers."""


def model_of_shape(shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device, max_model_len: int) -> Any:
    """A model that counts on; see `emssd.model.load.random_weights.counting_model`."""
    longest = {"max_position_embeddings": max(max_model_len, 2048)}
    return counting_model({**shape, **longest}, dtype, device)


def continuation(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The tokens that a `model_of_shape` generates after `prompt`."""
    return counted_on(prompt[-1], count, vocab_size)
