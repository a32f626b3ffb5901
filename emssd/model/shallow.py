"""`ShallowRunner`: the first decoder layers of a target as a draft model, with the target's own weights."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.attention import AttentionBackend, StepPlan
from emssd.model.runner import CausalLMRunner
from emssd.model.target import Computed, TargetModel

__all__ = ["ShallowRunner"]


class ShallowRunner(CausalLMRunner):
    """The first layers of a model, its final norm and its LM head, with a KV cache beside that of the whole model.

    Nothing is copied, and between two steps the model is as it was. It runs uncompiled, also where the model is
    compiled. Hidden states may be taken up to the last of these layers, and behind the norm (-1).

    Args:
        backend: allocated for these layers alone.
        num_layers: how many, from 1 to all.

    Raises:
        UnsupportedModelError: its layers are not found, or cannot be left out.
    """

    _takes_chains = False

    def __init__(self, model: TargetModel, backend: AttentionBackend, num_layers: int) -> None:
        super().__init__(model, backend)
        assert 1 <= num_layers <= model.num_layers, f"{num_layers} of {model.num_layers} layers"
        model.prepare_hidden(()).check_cut()
        self.num_layers = num_layers

    def take_hidden(self, indices: Seq[int]) -> None:
        """See `ModelRunner.take_hidden`. No compiled program of the model is made for it."""
        self.model.prepare_hidden(()).check(indices)
        self._hidden = tuple(indices)

    def _compute(self, plan: StepPlan, greedy: torch.Tensor | None = None) -> Computed:
        return self.model(plan, self.backend, self._hidden, self.num_layers, greedy=greedy)
