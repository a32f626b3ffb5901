"""Registers with Transformers the attention function that models call, and the masks that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from threading import get_ident
from typing import Any, Protocol

import torch

from emssd.attention import LayerSpec
from emssd.errors import UnsupportedModelError

__all__ = [
    "ATTENTION_NAME",
    "MASKED_NAME",
    "Attend",
    "Visible",
    "implementation",
    "in_a_pass",
    "keywords_known",
    "register",
    "with_windows",
]

# Not "emssd_flash…": Transformers searches this name for the substring "flash" and then wants flash-attn.
ATTENTION_NAME = "emssd"
"""The name under which Transformers knows the attention function of emssd."""
MASKED_NAME = "emssd_masked"  # the same, and the model makes its masks too; only to learn what they ask

Attend = Callable[[int, LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the attention of a layer from its index and rules, queries, keys and values ``[t, heads, dim]``."""

Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask function of Transformers: whether, by indices of batch, head, query and key, the query sees the key."""


# Keywords that models hand to every attention function and that do not change what attention computes here:
# positions are applied already, caching is ours, and the rest is bookkeeping of other implementations.
class RunnableModel(Protocol):
    """The part of a `TargetModel` that probes, traces and compilers use."""

    model: Any
    layers: tuple[LayerSpec, ...]
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    bytes_per_row: int
    lock: Any
    arithmetic: Any
    keeps_states: bool
    counts_calls: bool
    takes_positions: bool

    @property
    def run(self) -> Callable[..., torch.Tensor]: ...

    @property
    def call(self) -> Callable[..., Any]: ...


_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
     "is_causal", "layer_head_mask", "head_mask", "cache_position", "position_embeddings", "deterministic",
     "logits_to_keep", "emssd_masks"}
)  # fmt: skip


def register(model: torch.nn.Module) -> None:
    """Make both names known to Transformers, and `implementation` to the classes of the configs that `model` reads.

    Nothing else tells threads apart: a value of the config would be that of a user's own call, too, and `torch.compile`
    does not trace a `ContextVar`.
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


_PASSES: dict[int, tuple[str | None, bool]] = {}
"""By thread in a pass of a model: its attention, and whether experts run one by one. `torch.compile` guards a dict."""


@contextmanager
def implementation(attention: str | None = None, *, experts_in_loops: bool = False) -> Iterator[None]:
    """Within, models that this thread calls compute the `attention` of this name. No config is written to.

    With `experts_in_loops`, a mixture runs one expert after another, and not all in one grouped matrix product.
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
        if field == "_attn_implementation":
            return chosen[0] or value
        return "eager" if chosen[1] and value == "grouped_mm" else value

    return get


_KEYWORDS: ContextVar[Mapping[str, Any] | None] = ContextVar("_KEYWORDS", default=None)


@contextmanager
def keywords_known(keywords: Mapping[str, Any]) -> Iterator[None]:
    """Give the attention functions `keywords` in a call of a model, for models whose code does not pass them on."""
    token = _KEYWORDS.set(keywords)
    try:
        yield
    finally:
        _KEYWORDS.reset(token)


def with_windows(attend: Attend, windows: Mapping[int, int]) -> Attend:
    """`attend`, with the sliding windows of layers that do not pass them on."""
    if not windows:
        return attend

    def attend_within(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        if layer in windows:
            seen = replace(seen, sliding_window=windows[layer])
        return attend(layer, seen, *qkv)

    return attend_within


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
    emssd_attend: Attend | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: ``query [b, heads, n, dim]`` in, ``[b, n, heads, dim]`` out.

    It notes the function behind a mask of `_mask`, and refuses any other mask.
    """
    keywords = _KEYWORDS.get() or {}
    name, emssd_attend = type(module).__name__, emssd_attend or keywords.get("emssd_attend")
    if emssd_attend is None:
        raise UnsupportedModelError(f"{name} does not pass keywords on to its attention function, so no KV cache")
    visible = getattr(attention_mask, "emssd_visible", None)
    attention_mask = attention_mask if visible is None else None
    refused = features.keys() - _HARMLESS
    if refused:
        refused = {key for key in refused if features[key] is not None}
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
        sinks=None if s_aux is None else keywords["emssd_numbers"](s_aux),
    )
    calls = keywords.get("emssd_calls")
    layer = int(module.layer_idx) if calls is None else next(calls)  # type: ignore[arg-type]  # an integer then
    if visible is not None:
        keywords["emssd_masks"][layer] = visible
    out = emssd_attend(
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
