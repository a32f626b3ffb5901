"""`HookedModel`: an unmodified Hugging Face causal LM whose passes compute attention by a function of the caller.

Its attention goes through one registered function, and between two calls the model is left as it was.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from emssd.attention import LayerSpec
from emssd.data.model_options import ModelOptions
from emssd.model.hf.batch_invariance import arithmetic_of
from emssd.model.hf.device_map import is_spread, output_device
from emssd.model.hf.interface import Attend, PassAttention, Visible, implementation, register
from emssd.model.hf.recurrent_layers import install
from emssd.model.hf.refusals import resolve_max_model_len
from emssd.model.hf.streams import Hidden, Streams, lock_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HookedModel"]


class HookedModel:
    """A causal LM whose passes compute attention by a function that they are given.

    Args:
        model: any `PreTrainedModel` that speaks the attention interface, in evaluation mode.
        options: ``max_model_len`` and ``batch_invariant`` count.

    Attributes:
        device: of the logits and of everything that belongs to no layer.
        precision: the dtype whose roundings tell how far two computations may differ.
        is_spread: whether Accelerate moves what the model computes from device to device.
        layers: shape and rules of each attention layer, once they are learnt; of each call, if `counts_calls`.
        counts_calls: whether layers do not attend once each, so that calls are numbered, and not layers.
        keeps_states: whether layers mix tokens by a recurrence, with states of `bytes_per_row`.
        takes_positions: whether the model takes ``position_ids``.
        arithmetic: of every pass that no program runs; ``None`` for PyTorch's own.
        streams: where hidden states are taken; ``None`` until they are found.
        lock: held for a pass, by all that call this model through emssd.
    """

    def __init__(self, model: PreTrainedModel, options: ModelOptions) -> None:
        register(model)
        self.model: Any = model  # Transformers' own annotations do not describe how its models are called
        self.is_spread = is_spread(model)
        self.keeps_states = self.counts_calls = install(model)
        parameters = inspect.signature(type(model).forward).parameters.values()  # the module's own may be wrapped
        self._keywords = {"kwargs" if one.kind is one.VAR_KEYWORD else one.name for one in parameters}
        self.takes_positions = bool({"position_ids", "kwargs"} & self._keywords)
        self.lock = lock_of(model)
        self.max_model_len = resolve_max_model_len(model.config, options.max_model_len)
        self.device: torch.device = output_device(model)
        self.dtype: torch.dtype = model.dtype
        rounds_inputs = any(0 in part.stride() for part in model.parameters())  # packed layers do so, to bytes
        self.precision = torch.bfloat16 if rounds_inputs else self.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.arithmetic = arithmetic_of(model, self.device) if options.batch_invariant else None
        self.layers: tuple[LayerSpec, ...] = ()
        self.streams: Streams | None = None
        self.bytes_per_row = 0
        self._sink_values: Any = WeakTensorKeyDictionary()  # of each tensor its numbers; it has no annotations
        self._windows: dict[int, int] = {}  # of layers that do not pass theirs to the attention function

    @property
    def num_layers(self) -> int:
        """Decoder layers; those of `layers`, and those that keep a state."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    def run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        logits_to_keep: torch.Tensor | int = 0,
        *,
        masks: dict[int, Visible] | None = None,
        hidden: Hidden | None = None,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Call the model with `attend` in the place of its attention. Returns logits ``[b, m, vocab]``.

        Args:
            masks: gets the mask function of each layer, which the model then makes.
            hidden: its keys are the hidden states that are wanted, see `Streams`; gets them, ``[b, n, width]``.
            num_layers: only so many of the first layers are run. Like `hidden`, this needs `streams`.
        """
        if self.is_spread and isinstance(logits_to_keep, torch.Tensor):
            logits_to_keep = logits_to_keep.tolist()  # type: ignore[assignment]  # which indexes on any device
        taking = self.streams.taken(hidden) if self.streams is not None and hidden else nullcontext()
        cut = self.streams.cut(num_layers) if self.streams is not None and num_layers is not None else nullcontext()
        arithmetic = None if torch.compiler.is_compiling() else self.arithmetic
        # PyTorch has no grouped matrix product of float64, nor one that is the same in any batch.
        in_loops = self.dtype is torch.float64 or arithmetic is not None
        with (
            self.lock,
            implementation(self.attention_by(attend, masks), experts_in_loops=in_loops),
            taking,
            cut,
            nullcontext() if arithmetic is None else arithmetic,
        ):
            output = self.call(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logits_to_keep
            )
        logits: torch.Tensor = output.logits
        if "logits_to_keep" in self._keywords or isinstance(logits_to_keep, int):
            return logits
        return logits if logits.shape[1] == len(logits_to_keep) else logits[:, logits_to_keep]

    def call(self, **keywords: Any) -> Any:
        """Call the model with those of `keywords` that it takes."""
        takes_all = "kwargs" in self._keywords
        return self.model(**{name: value for name, value in keywords.items() if takes_all or name in self._keywords})

    def attention_by(self, attend: Attend, masks: dict[int, Visible] | None = None) -> PassAttention:
        """The attention of a pass: `attend`, outside of `arithmetic`, with windows that layers do not pass on."""
        windows, arithmetic = self._windows, None if torch.compiler.is_compiling() else self.arithmetic

        def attend_apart(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
            if layer in windows:
                seen = replace(seen, sliding_window=windows[layer])
            with nullcontext() if arithmetic is None else torch._C.DisableTorchFunction():
                return attend(layer, seen, *qkv)

        return PassAttention(attend_apart, self._values_of, count() if self.counts_calls else None, masks)

    def _values_of(self, sinks: torch.Tensor) -> tuple[float, ...]:
        """The numbers of ``sinks [heads]``, read once: on a GPU, the host waits for it."""
        if (values := self._sink_values.get(sinks)) is None:
            values = self._sink_values[sinks] = tuple(sinks.detach().flatten().tolist())
        return values  # type: ignore[no-any-return]  # the dictionary has no annotations
