"""The target of a trained head, whose sizes, embeddings and vocabulary projection it fits and borrows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from emssd.model import Attend
from emssd.model.hf.interface import PassAttention, implementation

__all__ = ["LAST_NORMED", "Embed", "Project", "TargetSizes", "attending"]

_CPU = torch.device("cpu")

LAST_NORMED = -1
"""Among numbers of hidden states: the last one, after the final norm. Number k is the residual stream before layer k,
counted from 0, and the number of layers is the stream after the last layer, before the norm."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""The target's embeddings ``[…, hidden_size]`` of token ids ``[…]``, as its first layer reads them."""

Project = Callable[[torch.Tensor], torch.Tensor]
"""The target's logits ``[n, vocab]`` of hidden states ``[n, hidden_size]`` that are normed already."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of the model that a head drafts for, and the type and device of the head's weights."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU


def attending(attend: Attend) -> AbstractContextManager[None]:
    """For a body that runs a layer of the target's classes: its attention is `attend`."""
    return implementation(PassAttention(attend))
