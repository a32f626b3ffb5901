"""No query's result depends on keys and values that it does not see, even if they are NaN.

A masked score of minus infinity becomes a weight of zero. Zero times a value is zero, unless the value is NaN or
infinite. PyTorch's kernels add masks and multiply by zero, so their results are checked here, and mended if need be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from emssd.attention.interface import LayerSpec

__all__ = ["StepWatch", "mended"]

_T = TypeVar("_T")
_QUERIES_AT_ONCE = 64  # bounds the memory of scores

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "LayerSpec"], torch.Tensor]


def mended(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    layer: LayerSpec,
    attend: Attend,
) -> torch.Tensor:
    """`out`, where each result that is not finite is computed again from what its query sees.

    A query that sees only finite keys and values gets the same bits as in a batch without NaN.

    Args:
        out: ``[b, n, num_qo_heads, value_dim]``.
        query, key, value, mask, layer: see `emssd.attention.masked_attention`.
        attend: the function that computed `out` from these.
    """
    if math.isfinite(out.sum()):
        return out
    spoiled = ~_finite(out)  # [b, n]
    seen, bad = mask == 0, ~(_finite(key) & _finite(value))  # [b, n, m], [b, m]
    cut = bad[:, :, None, None]
    without = attend(query, key.masked_fill(cut, 0), value.masked_fill(cut, 0), mask, layer)
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
    if layer.sinks is not None:
        scores = torch.cat(
            [scores, scores.new_tensor(layer.sinks).view(-1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1
        )
        seen = F.pad(seen, (0, 1), value=True)
        value = F.pad(value, (0, 0, 0, 1))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
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
