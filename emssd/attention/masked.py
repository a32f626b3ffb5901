"""Dense attention under a mask, for backends without a kernel of their own.

No query's result depends on keys and values that it does not see, even if they are NaN. A masked score of minus
infinity becomes a weight of zero. Zero times a value is zero, unless the value is NaN or infinite. PyTorch's kernels
add masks and multiply by zero, so their results are checked here, and mended if need be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F

from emssd.attention.interface import LayerSpec

__all__ = ["additive_mask", "masked_attention"]

_T = TypeVar("_T")
_SLOW_ALONE = (torch.bfloat16, torch.float16)
_QUERIES_AT_ONCE = 64  # bounds the memory of scores


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask that attention adds to its scores: 0 where a query sees a key, and minus infinity elsewhere.

    Args:
        visible: ``[b, n, m]`` bool; every query sees at least one key.
        dtype: of the queries.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


@dataclass(slots=True)
class StepMask:
    """The keys that the queries of a step see: those up to their own positions, within the window, that are not hidden.

    Attributes:
        positions: ``[b, n]`` int64, of the queries.
        key_positions: ``[b, m]`` or ``[m]`` int64, of the keys.
        hidden: ``[b, n, m]`` bool, true for keys that a query does not see; ``None`` where there are none.
    """

    positions: torch.Tensor
    key_positions: torch.Tensor
    hidden: torch.Tensor | None = None
    _masks: dict[tuple[int | None, torch.device, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def additive(self, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """``[b, n, m]`` as `additive_mask`, in the dtype and on the device of `like`; made once for each window."""
        kind = window, like.device, like.dtype
        if kind not in self._masks:
            queries, keys = self.positions.unsqueeze(-1), self.key_positions.unsqueeze(-2)
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            if self.hidden is not None:
                mask &= ~self.hidden
            self._masks[kind] = additive_mask(mask.to(like.device), like.dtype)
        return self._masks[kind]


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    layer: LayerSpec,
    *,
    checked: bool = True,
) -> torch.Tensor:
    """Dense attention under a mask, with all rules of the layer but its window, on any device and in any dtype.

    Args:
        query: ``[b, n, num_qo_heads, key_dim]``.
        key: ``[b, m, num_kv_heads, key_dim]``.
        value: ``[b, m, num_kv_heads, value_dim]``.
        mask: ``[b, n, m]`` of the dtype of `query`, see `additive_mask`.
        checked: make sure that keys and values change no query that does not see them, even if they are not finite.
            On a GPU the host waits for this; see `StepWatch`.

    Returns:
        ``[b, n, num_qo_heads, value_dim]``.
    """
    out = _attend(query, key, value, mask, layer)
    return _mended(out, query, key, value, mask, layer) if checked else out


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, layer: LayerSpec
) -> torch.Tensor:
    """Attention by PyTorch's kernels. For them, a weight of 0 times NaN is NaN."""
    if query.shape[1] == 1 and query.dtype in _SLOW_ALONE and query.device.type == "cpu":
        # PyTorch's kernel takes about three times as long for one query as for two (2.13, AVX-512).
        return _attend(query.repeat(1, 2, 1, 1), key, value, mask.expand(-1, 2, -1), layer)[:, :1]
    query, key, value, mask = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask.unsqueeze(1)
    grouped = layer.num_qo_heads != layer.num_kv_heads
    if layer.softcap is None and layer.sinks is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    if grouped:
        groups = layer.num_qo_heads // layer.num_kv_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = _weights_of(scores + mask, layer, wide).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


def _weights_of(scores: torch.Tensor, layer: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
    """Attention weights ``[…, num_qo_heads, n, m]`` of scores of that shape, computed in `dtype`, sinks left out."""
    if layer.sinks is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    sinks = torch.tensor(layer.sinks, dtype=dtype, device=scores.device).view(-1, 1, 1)
    with_sinks = torch.cat([scores.to(dtype), sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(with_sinks, dim=-1)[..., :-1]


def _mended(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, layer: LayerSpec
) -> torch.Tensor:
    """The output `out` of `_attend`; a result that is not finite is computed again from the keys that its query sees.

    A query that sees only finite keys and values gets the same bits as in a batch without NaN.
    """
    if math.isfinite(out.sum()):
        return out
    spoiled = ~_finite(out)  # [b, n]
    seen, bad = mask == 0, ~(_finite(key) & _finite(value))  # [b, n, m], [b, m]
    cut = bad[:, :, None, None]
    without = _attend(query, key.masked_fill(cut, 0), value.masked_fill(cut, 0), mask, layer)
    innocent = ~(seen & bad.unsqueeze(1)).any(dim=2) & _finite(without)
    out = torch.where((spoiled & innocent)[:, :, None, None], without, out)
    for row, queries in enumerate(spoiled & ~innocent):
        for places in queries.nonzero().flatten().split(_QUERIES_AT_ONCE):
            out[row, places] = _by_hand(query[row, places], key[row], value[row], seen[row, places], layer)
    return out


def _finite(heads: torch.Tensor) -> torch.Tensor:
    """Whether each token of ``[b, n, heads, dim]`` is finite, ``[b, n]``."""
    return heads.isfinite().flatten(2).all(dim=2)


def _by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, layer: LayerSpec
) -> torch.Tensor:
    """Attention of ``query [n, heads, dim]`` over ``key, value [m, kv_heads, dim]`` where ``seen [n, m]`` is true."""
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    query, key, value = (tensor.to(wide).transpose(0, 1) for tensor in (query, key, value))
    groups = layer.num_qo_heads // layer.num_kv_heads
    key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
    scores = query @ key.mT * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    weights = _weights_of(scores.masked_fill(~seen, float("-inf")), layer, wide)
    out = weights @ value.nan_to_num(0.0, 0.0, 0.0)
    sees_bad = seen.to(wide) @ (~value.isfinite()).to(wide) > 0  # element by element, [heads, n, dim]
    return out.masked_fill(sees_bad, float("nan")).transpose(0, 1).to(dtype)


@dataclass(slots=True)
class StepWatch:
    """Checks the results of a whole step at once, for devices where each check makes the host wait.

    `run` computes the step without checks. If a result was not finite, it computes the step again and mends each layer.
    """

    trusts: bool = False
    _sums: list[torch.Tensor] = field(default_factory=list)

    def saw(self, out: torch.Tensor) -> None:
        """Remember the result of a layer."""
        if self.trusts:
            self._sums.append(out.sum(dtype=torch.promote_types(out.dtype, torch.float32)))

    def run(self, compute: Callable[[], _T]) -> _T:
        """The result of `compute`; for `StepPlan.replay`."""
        self.trusts = True
        try:
            result = compute()
            fine = bool(torch.stack(self._sums).isfinite().all())
        finally:
            self.trusts = False
            self._sums.clear()
        return result if fine else compute()
