"""`HookedModel`: an unmodified Hugging Face causal LM whose attention goes through one registered function."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.errors import UnsupportedModelError
from emssd.model.interface import (
    ATTENTION_NAME,
    MASKED_NAME,
    Attend,
    Visible,
    implementation,
    keywords_known,
    register,
    with_windows,
)
from emssd.model.invariant import BatchInvariant, why_not_invariant
from emssd.model.mixing import install
from emssd.model.parallel import Group
from emssd.model.spread import is_spread, output_device
from emssd.model.streams import lock_of
from emssd.model.support import check_config, check_whole, resolve_max_model_len

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.model.streams import Hidden, Streams

__all__ = ["HookedModel"]


class HookedModel:
    """A causal LM that is called with another attention. Between two calls the model is left as it was.

    Attributes:
        device: where the logits come out, and all else is that is not a layer's own.
        is_spread: whether Accelerate moves what the model computes from device to device.
        layers: shape and rules of each attention layer, once they are known.
        bytes_per_row: what the states of a row take, once they are known.
        devices: where each computes its attention; empty if that is `device`.
        compiled: what runs in the place of `run`, a compiled program, or ``None``.
        streams: where its hidden states are taken; ``None`` as long as nobody asks for any.
        arithmetic: of every pass that no program runs; ``None`` for PyTorch's own.
        keeps_states: whether layers mix tokens by a recurrence, see `emssd.model.mixing`.
        counts_calls: whether `layers` are the calls of attention in a pass, in their order: where not every layer
            attends once.
        group: the processes that have a shard of it; this one alone, if it is whole.
        lock: held for a pass, by all that call this model through emssd.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int | None = None,
        group: Group | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._sinks: Any = WeakTensorKeyDictionary()  # of each tensor its numbers; it has no annotations
        self.model: Any = model  # Transformers' own annotations do not describe how its models are called
        model.eval()  # type: ignore[no-untyped-call]  # it has no annotations
        self.group = group or Group()
        check_config(model.config, type(model))
        if self.group.size == 1:
            check_whole(model)
        register(model)
        self.keeps_states = self.counts_calls = install(model)
        known = inspect.signature(type(model).forward).parameters.values()  # the module's own may be wrapped
        self._names = {"kwargs" if each.kind is each.VAR_KEYWORD else each.name for each in known}
        self.takes_positions = bool({"position_ids", "kwargs"} & self._names)
        self.lock = lock_of(model)
        self.is_spread = is_spread(model)
        self.max_model_len = resolve_max_model_len(model.config, max_model_len)
        self.device: torch.device = output_device(model)
        self.dtype: torch.dtype = model.dtype
        self.arithmetic = self._invariant() if batch_invariant else None
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._windows: dict[int, int] = {}  # those of layers that do not pass theirs to the attention function
        self.layers: tuple[LayerSpec, ...] = ()
        self.bytes_per_row = 0
        self.devices: tuple[torch.device, ...] = ()
        self.compiled: Any = None
        self.streams: Streams | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers; those of `layers`, and those that keep a state."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    def kv_cache_spec(self, max_batch_size: int) -> KVCacheSpec:
        """The KV cache that this model needs for batches of up to `max_batch_size` rows."""
        return KVCacheSpec(
            self.layers,
            self.dtype,
            self.device,
            max_batch_size,
            self.max_model_len,
            bytes_per_row=self.bytes_per_row,
            devices=self.devices,
        )

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

        Given `masks`, the model makes its masks too, and it is filled with the function behind that of each layer. The
        keys of `hidden` say which hidden states are wanted, see `Streams`; it is filled with these, ``[b, n, width]``.
        Given `num_layers`, only so many of the first layers are run. `streams` is wanted for both.
        """
        if self.is_spread and isinstance(logits_to_keep, torch.Tensor):
            logits_to_keep = logits_to_keep.tolist()  # type: ignore[assignment]  # which indexes on any device
        keywords: dict[str, Any] = {"emssd_attend": with_windows(self._apart(attend), self._windows)}
        if masks is not None:
            keywords["emssd_masks"] = masks
        calls = count() if self.counts_calls else None
        taking = self.streams.taken(hidden) if self.streams is not None and hidden else nullcontext()
        cut = self.streams.cut(num_layers) if self.streams is not None and num_layers is not None else nullcontext()
        own = None if torch.compiler.is_compiling() else self.arithmetic
        # PyTorch has no grouped matrix product of float64, nor one that is the same in any batch.
        in_loops = self.dtype is torch.float64 or own is not None
        with (
            self.lock,
            implementation(ATTENTION_NAME if masks is None else MASKED_NAME, experts_in_loops=in_loops),
            keywords_known(keywords | {"emssd_numbers": self._numbers, "emssd_calls": calls}),
            taking,
            cut,
            nullcontext() if own is None else own,
        ):
            output = self.call(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                **({} if self.is_spread else keywords),  # Accelerate would pass on copies; they are known as it is
            )
        logits: torch.Tensor = output.logits
        if "logits_to_keep" in self._names or isinstance(logits_to_keep, int):
            return logits
        return logits if logits.shape[1] == len(logits_to_keep) else logits[:, logits_to_keep]

    def call(self, **keywords: Any) -> Any:
        """Call the model with those of `keywords` that it takes."""
        names = self._names
        if "kwargs" not in names:
            keywords = {name: given for name, given in keywords.items() if name in names}
        return self.model(**keywords)

    def _invariant(self) -> BatchInvariant:
        why = "Accelerate moves it from device to device" if self.is_spread else None
        if (why := why or why_not_invariant(self.device, self.dtype)) is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} is not batch-invariant: {why}; leave model.batch_invariant out"
            )
        return BatchInvariant()

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Within, passes call PyTorch's own functions; the caller holds the lock."""
        before, self.arithmetic = self.arithmetic, None
        try:
            yield
        finally:
            self.arithmetic = before

    def _apart(self, attend: Attend) -> Attend:
        """`attend`, which has its own arithmetic."""
        if self.arithmetic is None or torch.compiler.is_compiling():
            return attend

        def attend_apart(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return attend(layer, seen, *qkv)

        return attend_apart

    @property
    def why_not_invariant(self) -> str | None:
        """In words, why the bits of a row may depend on its batch, attention apart; ``None`` if they do not."""
        if self.compiled is not None:
            why: str | None = self.compiled.why_not_invariant
            return why
        if self.arithmetic is None:
            return "model.batch_invariant=false"
        if self.keeps_states:
            return "some of its layers keep a state"
        missed = sorted(self.arithmetic.missed)
        return f"it calls {', '.join(missed)}" if missed else None

    def _numbers(self, sinks: torch.Tensor) -> tuple[float, ...]:
        """The numbers of ``sinks [heads]``, read once: on a GPU, the host waits for it."""
        if sinks not in self._sinks:
            self._sinks[sinks] = tuple(sinks.detach().flatten().tolist())
        numbers: tuple[float, ...] = self._sinks[sinks]
        return numbers
