"""What is registered with Transformers: the attention function that models call, and the masks that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from emssd.attention import LayerSpec
from emssd.errors import UnsupportedModelError

__all__ = [
    "ATTENTION_NAME",
    "MASKED_NAME",
    "Attend",
    "Visible",
    "implementation",
    "keywords_known",
    "one_expert_after_another",
    "register",
    "with_windows",
]

# Not "emssd_flash…": Transformers searches this name for the substring "flash" and then wants flash-attn.
ATTENTION_NAME = "emssd"
MASKED_NAME = "emssd_masked"  # the same, and the model makes its masks too; only to learn what they ask

Attend = Callable[[int, LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask function of Transformers: whether, by indices of batch, head, query and key, the query sees the key."""

# Keywords that models hand to every attention function and that do not change what attention computes here:
# positions are applied already, caching is ours, and the rest is bookkeeping of other implementations.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
     "is_causal", "layer_head_mask", "head_mask", "cache_position", "position_embeddings", "deterministic",
     "logits_to_keep"}
)  # fmt: skip


def register() -> None:
    """Make both names known to Transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionInterface.register(MASKED_NAME, _masked_attention)
    AttentionMaskInterface.register(MASKED_NAME, _mask)


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Set a model's attention for one call, so that a caller's own model still works as before after it.

    PyTorch has no grouped matrix product in float64, so there a mixture of experts runs one expert after another.
    """
    config = model.config
    attention = _of_each(config, "_attn_implementation")
    config._attn_implementation = name
    try:
        with one_expert_after_another(model) if model.dtype is torch.float64 else nullcontext():
            yield
    finally:
        config._attn_implementation = attention


@contextmanager
def one_expert_after_another(model: Any) -> Iterator[None]:
    """Run the experts of a mixture in a loop, and not in one grouped matrix product, for some calls."""
    config = model.config
    experts = _of_each(config, "_experts_implementation")
    is_grouped = "grouped_mm" in experts.values()
    if is_grouped:
        config._experts_implementation = "eager"
    try:
        yield
    finally:
        if is_grouped:
            config._experts_implementation = experts


def _of_each(config: Any, field: str) -> dict[str, str | None]:
    """What a config and those within it have for `field`, in the form that they take."""
    within = {key: getattr(config, key, None) for key in config.sub_configs}
    return {"": getattr(config, field, None)} | {
        key: getattr(each, field, None) for key, each in within.items() if each is not None
    }


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
    """`attend`, told of the sliding windows of layers that do not pass them on."""
    if not windows:
        return attend

    def attend_within(
        layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if layer in windows:
            seen = replace(seen, sliding_window=windows[layer])
        return attend(layer, seen, query, key, value)

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
    """The registered attention function: ``query [b, heads, n, dim]`` in, ``[b, n, heads, dim]`` out."""
    name, emssd_attend = type(module).__name__, emssd_attend or (_KEYWORDS.get() or {}).get("emssd_attend")
    if emssd_attend is None:
        raise UnsupportedModelError(f"{name} does not pass keywords on to its attention function, so no KV cache")
    refused = sorted(key for key, given in features.items() if given is not None and key not in _HARMLESS)
    if refused or dropout or attention_mask is not None:
        what = ", ".join(refused) or ("dropout" if dropout else "an attention mask of its own")
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
        sinks=None if s_aux is None else _numbers(s_aux),
    )
    out = emssd_attend(
        int(module.layer_idx),  # type: ignore[arg-type]  # every attention module of Transformers has this integer
        spec,
        query.transpose(1, 2).reshape(batch * num_tokens, num_heads, key_dim),
        key.transpose(1, 2).reshape(batch * num_tokens, spec.num_kv_heads, key_dim),
        value.transpose(1, 2).reshape(batch * num_tokens, spec.num_kv_heads, spec.value_dim),
    )
    return out.view(batch, num_tokens, num_heads, spec.value_dim), None


_SINKS: Any = WeakTensorKeyDictionary()  # of each tensor its version and its numbers; without annotations


def _numbers(sinks: torch.Tensor) -> tuple[float, ...]:
    """The numbers of ``sinks [heads]``, which are read again where they were written to."""
    if sinks.is_inference():  # which has no version
        return tuple(sinks.flatten().tolist())
    known: tuple[int, tuple[float, ...]] | None = _SINKS.get(sinks)
    if known is None or known[0] != sinks._version:
        known = _SINKS[sinks] = sinks._version, tuple(sinks.detach().flatten().tolist())
    return known[1]


def _masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    emssd_masks: dict[int, Visible] | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """`_attention`, which notes the mask function behind each layer's mask; a mask that we did not make is refused."""
    visible = getattr(attention_mask, "emssd_visible", None)
    emssd_masks = emssd_masks if emssd_masks is not None else (_KEYWORDS.get() or {}).get("emssd_masks")
    if visible is not None and emssd_masks is not None:
        emssd_masks[int(module.layer_idx)] = visible  # type: ignore[arg-type]  # as above
        attention_mask = None
    return _attention(module, query, key, value, attention_mask, **features)


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Visible, device: torch.device, **_: Any
) -> torch.Tensor:
    """The registered mask function: a mask that hides nothing, and that carries the function that it should follow."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.to = lambda *_, **__: mask  # type: ignore[method-assign]  # nobody reads it, so it need not follow a layer
    mask.emssd_visible = mask_function  # type: ignore[attr-defined]  # what the model makes of it does not have that
    return mask
