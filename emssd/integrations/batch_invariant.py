"""`batch_invariant`: a trainer's forward pass with the bits of a rollout, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # PyTorch's own name for it

from emssd.attention import AttentionBackend, LayerSpec, StepMask
from emssd.attention.masked import masked_attention
from emssd.data.model_options import ModelOptions
from emssd.decoding.packing import pack_nodes
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.hooks.registry import Registry
from emssd.integrations.kept_engine import evaluating
from emssd.model.hf.interface import PassAttention, implementation, in_a_pass
from emssd.model.hf.streams import replaced_forward
from emssd.model.run.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["batch_invariant"]


@contextmanager
def batch_invariant(model: PreTrainedModel) -> Iterator[None]:
    """Within, `model` computes in this thread what a rollout by emssd computes, bit for bit, with gradients.

    Its logits are those of an uncompiled engine with ``batch_invariant=True`` and ``backend=ragged`` on the same
    weights, in their precision and in any batch. Rows are padded on any side, with an attention mask, or packed one
    after another in a line, each with positions from 0. Gradients are PyTorch's, of the same formulas.

    Args:
        model: on a CPU, in float32, bfloat16 or float64; one with adapters of PEFT, too.

    Raises:
        UnsupportedModelError: its bits depend on the batch, with the reason.
    """
    wrapped: Any = model
    inner = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    with evaluating(inner):
        target = TargetModel(inner, ModelOptions(compile=False, batch_invariant=True), frozen=True)
    why = target.why_not_invariant
    if target.keeps_states or any(layer.sinks is not None for layer in target.layers):
        why = "some of its layers keep a state, or have attention sinks, which get no gradient"
    if why is not None:
        raise UnsupportedModelError(f"{type(inner).__name__} is not batch-invariant: {why}")
    registry, forward = Registry(), inner.forward
    ragged = registry.resolve("backend", "ragged")

    def invariant(input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if in_a_pass():  # of an engine
            return forward(input_ids, *args, **kwargs)
        if args or input_ids is None or kwargs.get("past_key_values") is not None:
            raise ConfigError("within batch_invariant, a model takes input_ids and keywords, and no KV cache")
        masks = (kwargs.pop(name, None) for name in ("attention_mask", "position_ids"))
        rows = _Rows(target, registry.build("backend", *ragged), input_ids, *masks)
        attention = replace(target.attention_by(rows.attend), calls=None)
        kwargs |= {"position_ids": rows.positions, "use_cache": False}
        with _pass(target, attention), _checkpoints(inner, target, attention), torch.autocast("cpu", enabled=False):
            return forward(input_ids, **kwargs)

    with replaced_forward(inner, invariant):
        yield


@contextmanager
def _pass(target: TargetModel, attention: PassAttention) -> Iterator[None]:
    assert target.arithmetic is not None
    with implementation(attention, experts_in_loops=True), target.arithmetic:
        yield


@contextmanager
def _checkpoints(model: Any, target: TargetModel, attention: PassAttention) -> Iterator[None]:
    """Layers that a trainer computes again in its backward pass compute the same there."""
    wanted = [
        module for module in model.modules() if module.training and getattr(module, "gradient_checkpointing", False)
    ]
    before = {module: module._gradient_checkpointing_func for module in wanted}
    try:
        for module, checkpoint in before.items():
            if checkpoint.keywords.get("use_reentrant") is not False:
                raise ConfigError("within batch_invariant, gradient checkpointing needs use_reentrant=False")
            again = partial(checkpoint, context_fn=lambda: (nullcontext(), _pass(target, attention)))
            module._gradient_checkpointing_func = again
        yield
    finally:
        for module, checkpoint in before.items():
            module._gradient_checkpointing_func = checkpoint


class _Rows:
    """The rows of one call, and their attention.

    Attributes:
        positions: ``[b, n]`` of each token in its row.
    """

    def __init__(
        self,
        target: TargetModel,
        backend: AttentionBackend,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> None:
        real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
        if real.shape != input_ids.shape:
            raise ConfigError(f"within batch_invariant, an attention mask is [b, n], and this one is {[*real.shape]}")
        counted = real.cumsum(1) - 1 if positions is None else positions.expand_as(input_ids)
        self.positions = counted.masked_fill(~real, 0)
        self.index = real.flatten().nonzero().squeeze(1)
        flat = self.positions.flatten()[self.index]
        starts = (flat == 0).nonzero().squeeze(1).tolist()
        lengths = [end - start for start, end in pairwise([*starts, len(flat)])]
        if not starts or flat.tolist() != [position for length in lengths for position in range(length)]:
            raise ConfigError("within batch_invariant, positions count from 0 in every row")
        backend.allocate(replace(target.kv_cache_spec(len(starts)), max_model_len=max(lengths)))
        if not backend.batch_invariant:
            raise UnsupportedModelError(f"the attention of {type(backend).__name__} promises no bits")
        names = [str(row) for row in range(len(starts))]
        self.backend = backend
        self.plan = backend.plan(pack_nodes(names, input_ids.flatten()[self.index], lengths, lengths, None))
        self.places = torch.nn.utils.rnn.pad_sequence([*torch.split_with_sizes(self.index, lengths)], True, -1)

    def attend(self, layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        """Compute attention, as `emssd.model.hf.interface.Attend`."""
        out: torch.Tensor = _Attention.apply(self, layer, seen, *qkv)  # type: ignore[no-untyped-call]
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: _Rows, layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*qkv)
        ctx.rows, ctx.seen = rows, seen
        out = rows.backend.forward(rows.plan, layer, *(tensor[rows.index] for tensor in qkv))
        return out.new_zeros(len(qkv[0]), *out.shape[1:]).index_copy_(0, rows.index, out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """In one rectangle, whose padding stands after each row."""
        places, index, saved = ctx.rows.places, ctx.rows.index, ctx.saved_tensors
        real, qkv = places >= 0, [tensor[places].requires_grad_() for tensor in saved]
        with torch.enable_grad():
            out = _attention(ctx.seen, *qkv)
        gradients = zip(saved, torch.autograd.grad(out, qkv, grads[0][places] * real[..., None, None]), strict=True)
        return None, None, None, *(torch.zeros_like(to).index_copy_(0, index, tensor[real]) for to, tensor in gradients)


def _attention(seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Of rows ``[r, n, heads, dim]``, by PyTorch."""
    if seen.sliding_window is None and seen.softcap is None:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        grouped = seen.num_kv_heads != seen.num_qo_heads
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=seen.scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    count = torch.arange(query.shape[1])
    mask = StepMask(count[None], count).additive(seen.sliding_window, query)
    return masked_attention(query, key, value, mask.expand(len(query), -1, -1), seen, checked=False)
