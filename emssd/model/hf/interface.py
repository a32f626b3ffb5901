"""Registers with Transformers the attention function that models call, and the masks that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch

from emssd.attention import LayerSpec
from emssd.errors import UnsupportedModelError

__all__ = ["ATTENTION_NAME", "Attend", "PassAttention", "Visible", "implementation", "in_a_pass", "register"]

# Not "emssd_flash…": Transformers searches this name for the substring "flash" and then wants flash-attn.
ATTENTION_NAME = "emssd"
"""The name under which Transformers knows the attention function of emssd."""
MASKED_NAME = "emssd_masked"  # the same, and the model makes its masks too; only to learn what they ask

Attend = Callable[[int, LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the attention of a layer from its index and rules, queries, keys and values ``[t, heads, dim]``."""

Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask function of Transformers: whether, by indices of batch, head, query and key, the query sees the key."""


@dataclass(frozen=True, slots=True)
class PassAttention:
    """The attention of one pass of a model.

    Attributes:
        attend: computes it.
        read_sinks: gives the numbers of a tensor of attention sinks.
        calls: numbers the calls, of a model whose layers do not attend once each; ``None`` for the layers' own indices.
        masks: gets the mask function of each layer; ``None`` lets the model make no masks.
    """

    attend: Attend
    read_sinks: Callable[[torch.Tensor], tuple[float, ...]] = lambda sinks: tuple(sinks.tolist())
    calls: Iterator[int] | None = None
    masks: dict[int, Visible] | None = None


# Keywords that models hand to every attention function and that do not change what attention computes here:
# positions are applied already, caching is ours, and the rest is bookkeeping of other implementations.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
     "is_causal", "layer_head_mask", "head_mask", "cache_position", "position_embeddings", "deterministic",
     "logits_to_keep"}
)  # fmt: skip


def register(model: torch.nn.Module) -> None:
    """Make both names known to Transformers, and `implementation` to the classes of the configs that `model` reads.

    A value of the config would be that of a user's own call in another thread, too.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionInterface.register(MASKED_NAME, _attention)
    AttentionMaskInterface.register(MASKED_NAME, _mask)
    for kind in {type(getattr(module, "config", None)) for module in model.modules()}:
        for field in ("_attn_implementation", "_experts_implementation"):
            original = getattr(kind, field, None)
            if isinstance(original, property) and not isinstance(original, _OfThisPass):
                setattr(kind, field, _OfThisPass(_getter(original, field), original.fset))


_PASSES: dict[int, tuple[str | PassAttention | None, bool]] = {}
"""By thread in a pass of a model: its attention, and whether experts run one by one. `torch.compile` guards a dict."""


@contextmanager
def implementation(attention: str | PassAttention | None = None, *, experts_in_loops: bool = False) -> Iterator[None]:
    """Within, models that this thread calls compute this `attention`, ours or Transformers' of that name.

    With `experts_in_loops`, a mixture runs one expert after another, and not all in one grouped matrix product. No
    config is written to.
    """
    thread = get_ident()
    before = _PASSES.get(thread)
    outer_attention, outer_experts = before or (None, False)
    _PASSES[thread] = attention or outer_attention, experts_in_loops or outer_experts
    try:
        yield
    finally:
        if before is None:
            del _PASSES[thread]
        else:
            _PASSES[thread] = before


def in_a_pass() -> bool:
    """Whether this thread is in a pass of a model, within `implementation`."""
    return get_ident() in _PASSES


class _OfThisPass(property):
    """A property of configs that `implementation` replaces."""


def _getter(original: property, field: str) -> Callable[[Any], Any]:
    def get(config: Any) -> Any:
        value = original.fget(config)  # type: ignore[misc]  # every property of a config can be read
        if not _PASSES or (chosen := _PASSES.get(get_ident())) is None:
            return value
        attention, experts_in_loops = chosen
        if field == "_attn_implementation":
            if isinstance(attention, PassAttention):
                return ATTENTION_NAME if attention.masks is None else MASKED_NAME
            return attention or value
        return "eager" if experts_in_loops and value == "grouped_mm" else value

    return get


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: ``query [b, heads, n, dim]`` in, ``[b, n, heads, dim]`` out.

    It notes the function behind a mask of `_mask`, and refuses any other mask.
    """
    name = type(module).__name__
    ours, _ = _PASSES.get(get_ident(), (None, False))
    if not isinstance(ours, PassAttention):
        raise UnsupportedModelError(f"{name} attends outside of a pass of emssd, where there is no KV cache")
    visible = getattr(attention_mask, "emssd_visible", None)
    attention_mask = attention_mask if visible is None else None
    refused = [key for key in unknown if features[key] is not None] if (unknown := features.keys() - _HARMLESS) else []
    if refused or dropout or attention_mask is not None:
        what = ", ".join(sorted(refused)) or ("dropout" if dropout else "an attention mask of its own")
        raise UnsupportedModelError(f"{name} asks its attention for {what}, which emssd does not compute")
    batch, num_heads, num_tokens, key_dim = query.shape
    spec = LayerSpec(
        num_qo_heads=num_heads,
        num_kv_heads=key.shape[1],
        key_dim=key_dim,
        value_dim=value.shape[3],
        scale=float(scaling) if scaling is not None else key_dim**-0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else ours.read_sinks(s_aux),
    )
    layer = int(module.layer_idx) if ours.calls is None else next(ours.calls)  # type: ignore[arg-type]  # an integer
    if visible is not None and ours.masks is not None:
        ours.masks[layer] = visible
    out = ours.attend(
        layer,
        spec,
        query.transpose(1, 2).reshape(batch * num_tokens, num_heads, key_dim),
        key.transpose(1, 2).reshape(batch * num_tokens, spec.num_kv_heads, key_dim),
        value.transpose(1, 2).reshape(batch * num_tokens, spec.num_kv_heads, spec.value_dim),
    )
    return out.view(batch, num_tokens, num_heads, spec.value_dim), None


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Visible, device: torch.device, **_: Any
) -> torch.Tensor:
    """The registered mask function: a mask that hides nothing, and that carries the function that it should follow."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.to = lambda *_, **__: mask  # type: ignore[method-assign]  # nobody reads it, so it need not follow a layer
    mask.emssd_visible = mask_function  # type: ignore[attr-defined]  # what the model makes of it does not have that
    return mask
