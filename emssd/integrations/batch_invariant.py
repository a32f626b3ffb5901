"""`batch_invariant`: a trainer's forward pass with the bits of a rollout, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from emssd.attention import AttentionBackend, LayerSpec, PackedInputs, StepPlan
from emssd.attention.masked import additive_mask, masked_attention
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.integrations.hf import training_flags_kept
from emssd.model.interface import ATTENTION_NAME, implementation, in_a_pass, keywords_known, with_windows
from emssd.model.replaced import replaced_forward
from emssd.model.target import TargetModel
from emssd.plugins.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["batch_invariant"]


@contextmanager
def batch_invariant(model: PreTrainedModel) -> Iterator[None]:
    """Within, `model` computes in this thread what a rollout by emssd computes, bit for bit, with gradients.

    Its logits are those of an uncompiled engine with ``batch_invariant=True`` and ``backend=ragged`` on the same
    weights, in their precision and in any batch. Rows are padded on any side, with an attention mask, or packed one
    behind another in a line, each with positions from 0. Gradients are PyTorch's, of the same formulas.

    Args:
        model: on a CPU, in float32, bfloat16 or float64; one with adapters of PEFT, too.

    Raises:
        UnsupportedModelError: its bits depend on the batch, with the reason.
    """
    known: Any = model
    own = known.get_base_model() if hasattr(known, "get_base_model") else known
    with training_flags_kept(own):
        target = TargetModel(own, frozen=True, batch_invariant=True)
    why = target.why_not_invariant
    if target.keeps_states or any(layer.sinks is not None for layer in target.layers):
        why = "some of its layers keep a state, or have attention sinks, which get no gradient"
    if why is not None:
        raise UnsupportedModelError(f"{type(own).__name__} is not batch-invariant: {why}")
    forward = own.forward

    def invariant(input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if in_a_pass():  # of an engine
            return forward(input_ids, *args, **kwargs)
        if args or input_ids is None or kwargs.get("past_key_values") is not None:
            raise ConfigError("within batch_invariant, a model takes input_ids and keywords, and no KV cache")
        rows = _Rows(target, input_ids, kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None))
        keywords = {"emssd_attend": with_windows(rows.attend, target._windows)}
        kwargs |= {"position_ids": rows.positions, "use_cache": False}
        with _pass(target, keywords), _checkpoints(own, target, keywords), torch.autocast("cpu", enabled=False):
            return forward(input_ids, **keywords, **kwargs)

    with replaced_forward(own, invariant):
        yield


@contextmanager
def _pass(target: TargetModel, keywords: dict[str, Any]) -> Iterator[None]:
    assert target.arithmetic is not None
    known = keywords | {"emssd_numbers": target._numbers, "emssd_calls": None}
    with implementation(ATTENTION_NAME, experts_in_loops=True), keywords_known(known), target.arithmetic:
        yield


@contextmanager
def _checkpoints(model: Any, target: TargetModel, keywords: dict[str, Any]) -> Iterator[None]:
    """Layers that a trainer computes again in its backward pass compute the same there."""
    before = {each: each._gradient_checkpointing_func for each in model.modules() if _checkpointed(each)}
    try:
        for module, own in before.items():
            if own.keywords.get("use_reentrant") is not False:
                raise ConfigError("within batch_invariant, gradient checkpointing needs use_reentrant=False")
            again = {"context_fn": lambda: (nullcontext(), _pass(target, keywords))}
            module._gradient_checkpointing_func = _with(own, again)
        yield
    finally:
        for module, own in before.items():
            module._gradient_checkpointing_func = own


def _checkpointed(module: Any) -> bool:
    return module.training and getattr(module, "gradient_checkpointing", False)


def _with(function: Any, more: dict[str, Any]) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs, **more)


class _Rows:
    """The rows of one call, and their attention.

    Attributes:
        positions: ``[b, n]`` of each token in its row.
    """

    def __init__(
        self, target: TargetModel, input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> None:
        real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
        if real.shape != input_ids.shape:
            raise ConfigError(f"within batch_invariant, an attention mask is [b, n], and this one is {[*real.shape]}")
        given = real.cumsum(1) - 1 if positions is None else positions.expand_as(input_ids)
        self.positions = given.masked_fill(~real, 0)
        self._index = real.flatten().nonzero().squeeze(1)
        flat = self.positions.flatten()[self._index]
        starts = (flat == 0).nonzero().squeeze(1).tolist()
        ends = [*starts[1:], len(flat)]
        lengths = [end - start for start, end in zip(starts, ends, strict=False)]
        if not starts or flat.tolist() != [place for length in lengths for place in range(length)]:
            raise ConfigError("within batch_invariant, positions count from 0 in every row")
        tokens = input_ids.flatten()[self._index]
        names = tuple(str(row) for row in range(len(starts)))
        packed = PackedInputs(names, tokens, flat, (0, *ends), tuple(lengths), torch.tensor(ends) - 1)
        registry = Registry()
        spec, config = registry.resolve("backend", "ragged")
        self._backend: AttentionBackend = registry.build("backend", spec, config)
        shape = replace(target.kv_cache_spec(len(starts)), max_model_len=max(lengths))
        self._backend.allocate(shape)
        if not self._backend.batch_invariant:
            raise UnsupportedModelError(f"the attention of {type(self._backend).__name__} promises no bits")
        self._plan: StepPlan = self._backend.plan(packed)
        own = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        self._places = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=-1)

    def attend(self, layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        """What `emssd.model.interface.Attend` asks."""
        with torch._C.DisableTorchFunction():
            own = [each[self._index] for each in qkv]
            out: torch.Tensor = _Attention.apply(self, layer, seen, *own)  # type: ignore[no-untyped-call]
            return out.new_zeros(qkv[0].shape[0], *out.shape[1:]).index_copy(0, self._index, out)

    def attended(self, layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        """By the kernel of a rollout."""
        return self._backend.forward(self._plan, layer, *(each.contiguous() for each in qkv))

    def formula(self, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        """By PyTorch, in one rectangle."""
        places, count = self._places.clamp_min(0), torch.arange(self._places.shape[1])
        sees = count[None, :] <= count[:, None]
        if seen.sliding_window is not None:
            sees = sees & (count[None, :] > count[:, None] - seen.sliding_window)
        mask = additive_mask(sees.expand(len(places), *sees.shape), qkv[0].dtype)
        query, key, value = (each[places] for each in qkv)
        out = masked_attention(query, key, value, mask, seen, checked=False)
        return out[self._places >= 0]


class _Attention(torch.autograd.Function):
    """The kernel of a rollout, with the gradients of PyTorch's attention."""

    @staticmethod
    def forward(ctx: Any, rows: _Rows, layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*qkv)
        ctx.rows, ctx.seen = rows, seen
        return rows.attended(layer, *qkv)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.rows.formula(ctx.seen, *qkv)
        return None, None, None, *torch.autograd.grad(out, qkv, grads[0])
