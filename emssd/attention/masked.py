"""Dense attention under a mask, for backends without a kernel of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from emssd.attention.interface import LayerSpec
from emssd.attention.seen import mended

__all__ = ["StepMask", "additive_mask", "masked_attention", "weights_of"]

_SLOW_ALONE = (torch.bfloat16, torch.float16)


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
            On a GPU the host waits for this; see `emssd.attention.seen.StepWatch`.

    Returns:
        ``[b, n, num_qo_heads, value_dim]``.
    """
    out = _attend(query, key, value, mask, layer)
    return mended(out, query, key, value, mask, layer, _attend) if checked else out


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
    weights = weights_of(scores + mask, layer, wide).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


def weights_of(scores: torch.Tensor, layer: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
    """Attention weights ``[…, num_qo_heads, n, m]`` of scores of that shape, computed in `dtype`, sinks left out."""
    if layer.sinks is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    sinks = torch.tensor(layer.sinks, dtype=dtype, device=scores.device).view(-1, 1, 1)
    with_sinks = torch.cat([scores.to(dtype), sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(with_sinks, dim=-1)[..., :-1]
