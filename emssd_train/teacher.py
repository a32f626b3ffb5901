"""The target's outputs that a drafter learns from: hidden states and logits, computed anew for each batch of texts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from emssd.model import BorrowedTarget, TargetModel

__all__ = ["Lesson", "Teacher"]


class Lesson(NamedTuple):
    """The target's outputs for a batch of texts.

    Attributes:
        embeds: ``[b, n, hidden_size]`` of its tokens.
        hidden: ``[b, n, num_layers * hidden_size]`` hidden states, side by side; of no layers, ``[b, n, 0]``.
        logits: ``[b, n, vocab]``.
    """

    embeds: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


class Teacher:
    """The target. Nothing of it is trained, and nothing that it computes is kept.

    Args:
        target: the model.
        layers: the hidden states that are wanted, see `emssd.model.streams.Streams`.

    Raises:
        UnsupportedModelError: the model gives none.
    """

    def __init__(self, target: TargetModel, layers: Seq[int]) -> None:
        self.borrowed = BorrowedTarget(target)
        target.prepare_hidden(layers)
        target.model.requires_grad_(False)
        self._target, self._layers = target, tuple(layers)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor) -> Lesson:
        """The lesson of ``input_ids [b, n]``, which are padded on the right if at all."""
        streams = self._target.streams
        assert streams is not None
        hidden = dict.fromkeys(self._layers, torch.empty(0))
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        with streams.taken(hidden):
            logits = self._target.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        states = torch.cat([logits[..., :0], *(hidden[layer] for layer in self._layers)], dim=-1)
        return Lesson(self.borrowed.embed(input_ids), states, logits)
