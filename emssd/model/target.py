"""`TargetModel`: a Hugging Face causal LM that was probed, and is ready to run ragged steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from emssd.attention import AttentionBackend, LayerSpec, StepPlan
from emssd.errors import CompileError, UnsupportedModelError
from emssd.model.hooked import HookedModel
from emssd.model.masks import learn_windows
from emssd.model.probe import probe_layers
from emssd.model.streams import Hidden, Streams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.model.compiled import CompiledForward
    from emssd.model.parallel.group import Shard

__all__ = ["Computed", "TargetModel"]


class Computed(NamedTuple):
    """What a pass gives.

    Attributes:
        logits: ``[b * m, vocab]`` of a whole plan, ``[R, vocab]`` of the wanted rows.
        hidden: by index, see `emssd.model.streams.Streams`, ``[b * n, width]``.
    """

    logits: torch.Tensor
    hidden: Hidden


class TargetModel(HookedModel):
    """A causal LM ready to run ragged steps.

    Args:
        model: any `PreTrainedModel` that speaks the attention interface. Between two calls it is left as it was.
        max_model_len: longest sequence to allow; ``None`` takes the model's own limit.
        compile: run the forward pass as one compiled program, see `emssd.model.compiled`. Where that cannot be, a
            warning says why, and the model runs as it is.
        shard: where the others are, if this process has but a shard of the model. All processes do this, and every
            call, together.

    Attributes:
        compiled: that program, or ``None``.

    Raises:
        UnsupportedModelError: with the reason, if its output would not be that of the model.
        ConfigError: `max_model_len` beyond the model's limit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int | None = None,
        compile: bool = False,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(model, max_model_len=max_model_len, shard=shard)
        self._windows = learn_windows(self)
        self.layers = probe_layers(self)
        self.compiled = self._compile() if compile else None

    def prepare_hidden(self, indices: Seq[int]) -> Streams:
        """From now on, these hidden states can be asked for; see `emssd.model.streams.Streams` for the indices.

        A compiled program that does not give them is compiled again. Returns where they are taken.

        Raises:
            UnsupportedModelError: with the reason.
        """
        if self.streams is None:
            self.streams = Streams(self)
        self.streams.check(indices)
        if self.compiled is not None and not {*indices} <= {*(given := self.compiled.hidden)}:
            self.compiled = None  # first, as a program holds weights of its own
            self.compiled = self._compile(tuple(sorted({*given, *indices})))
        return self.streams

    def __call__(
        self, plan: StepPlan, backend: AttentionBackend, indices: Seq[int] = (), num_layers: int | None = None
    ) -> Computed:
        """Run one step. Gives logits of the wanted rows only, and the hidden states `indices` of all fed tokens.

        Given `num_layers`, only so many of the first layers are run, uncompiled. `prepare_hidden` comes before that.
        """

        def attend(
            layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if seen != self.layers[layer]:
                raise UnsupportedModelError(
                    f"layer {layer} changed its attention from {self.layers[layer]} to {seen} while running; "
                    f"emssd serves models whose layers attend by fixed rules"
                )
            return backend.forward(plan, layer, query, key, value)

        def forward() -> Computed:
            whole = self.compiled or self.run
            run = whole if num_layers is None else partial(self.run, num_layers=num_layers)
            hidden = dict.fromkeys(indices, _NOTHING)
            logits = run(plan.input_ids, plan.position_ids, attend, plan.logits_to_keep, hidden=hidden)
            return Computed(logits.flatten(0, 1), {index: each.flatten(0, 1) for index, each in hidden.items()})

        logits, hidden = forward() if plan.replay is None else plan.replay(forward)
        assert hidden.keys() >= {*indices}, "this step was recorded before these hidden states were asked for"
        return Computed(logits if plan.logit_index is None else logits[plan.logit_index], hidden)

    def _compile(self, hidden: tuple[int, ...] = ()) -> CompiledForward | None:
        from emssd.model.compiled import CompiledForward

        try:
            return CompiledForward(self, hidden)
        except CompileError as error:
            warnings.warn(f"the model runs without model.compile: {error}", RuntimeWarning, stacklevel=3)
            return None


_NOTHING = torch.empty(0)  # in the place of hidden states that are not computed yet
