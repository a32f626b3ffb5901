"""`TargetModel`: a Hugging Face causal LM that was probed, and is ready to run ragged steps."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from emssd.attention import AttentionBackend, LayerSpec, StepPlan
from emssd.errors import CompileError, UnsupportedModelError
from emssd.model.hooked import HookedModel
from emssd.model.masks import learn_windows
from emssd.model.probe import probe_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.model.compiled import CompiledForward

__all__ = ["TargetModel"]


class TargetModel(HookedModel):
    """A causal LM ready to run ragged steps.

    Args:
        model: any `PreTrainedModel` that speaks the attention interface. Between two calls it is left as it was.
        max_model_len: longest sequence to allow; ``None`` takes the model's own limit.
        compile: run the forward pass as one compiled program, see `emssd.model.compiled`. Where that cannot be, a
            warning says why, and the model runs as it is.

    Attributes:
        compiled: that program, or ``None``.

    Raises:
        UnsupportedModelError: with the reason, if its output would not be that of the model.
        ConfigError: `max_model_len` beyond the model's limit.
    """

    def __init__(self, model: PreTrainedModel, *, max_model_len: int | None = None, compile: bool = False) -> None:
        super().__init__(model, max_model_len=max_model_len)
        self._windows = learn_windows(self)
        self.layers = probe_layers(self)
        self.compiled = self._compile() if compile else None

    def __call__(self, plan: StepPlan, backend: AttentionBackend) -> torch.Tensor:
        """Run one step. Returns logits ``[R, vocab]`` of the wanted rows only."""

        def attend(
            layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if seen != self.layers[layer]:
                raise UnsupportedModelError(
                    f"layer {layer} changed its attention from {self.layers[layer]} to {seen} while running; "
                    f"emssd serves models whose layers attend by fixed rules"
                )
            return backend.forward(plan, layer, query, key, value)

        def forward() -> torch.Tensor:
            run = self.compiled or self.run
            return run(plan.input_ids, plan.position_ids, attend, plan.logits_to_keep).flatten(0, 1)

        logits = forward() if plan.replay is None else plan.replay(forward)
        return logits if plan.logit_index is None else logits[plan.logit_index]

    def _compile(self) -> CompiledForward | None:
        from emssd.model.compiled import CompiledForward

        try:
            return CompiledForward(self)
        except CompileError as error:
            warnings.warn(f"the model runs without model.compile: {error}", RuntimeWarning, stacklevel=3)
            return None
