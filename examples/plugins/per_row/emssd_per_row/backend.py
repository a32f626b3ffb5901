"""Keeps the keys and values of each sequence as one tensor per layer, and attends row by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from emssd.attention import (
    AttentionBackend,
    Kept,
    KVCacheSpec,
    KVUsage,
    PackedInputs,
    StepPlan,
    additive_mask,
    masked_attention,
)

__all__ = ["PerRowBackend"]


class PerRowBackend(AttentionBackend):
    """Nothing is padded and nothing shared: to roll a draft back is to remember a smaller number."""

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        return []

    def allocate(self, spec: KVCacheSpec) -> None:
        self._spec = spec
        self._lengths: dict[str, int] = {}
        self._pairs: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by request and layer
        self._peak = 0

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._spec.max_tokens is None or sum(kv_lens.values()) <= self._spec.max_tokens

    def plan(self, packed: PackedInputs) -> StepPlan:
        self._lengths |= zip(packed.request_ids, packed.kv_lens, strict=True)
        self._peak = max(self._peak, self.kv_usage.held)
        return StepPlan.ragged(packed, packed)  # the model is fed one row of nnz tokens; forward reads `packed`

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        packed: PackedInputs = plan.attention
        rules = self._spec.layers[layer]
        outputs = []
        for request_id, kv_len, (start, stop) in zip(
            packed.request_ids, packed.kv_lens, pairwise(packed.qo_indptr), strict=True
        ):
            num_cached = kv_len - (stop - start)
            keys, values = self._appended(request_id, layer, num_cached, key[start:stop], value[start:stop])
            queries_at = torch.arange(num_cached, kv_len, device=query.device).unsqueeze(1)
            keys_at = torch.arange(kv_len, device=query.device)
            visible = keys_at <= queries_at
            if rules.sliding_window is not None:
                visible &= keys_at > queries_at - rules.sliding_window
            mask = additive_mask(visible.unsqueeze(0), query.dtype)
            rows = (tensor.unsqueeze(0) for tensor in (query[start:stop], keys, values))
            outputs.append(masked_attention(*rows, mask, rules)[0])
        return torch.cat(outputs)

    def commit(self, kept: Kept) -> None:
        self._lengths |= zip(kept.request_ids, kept.kv_lens, strict=True)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._lengths.pop(request_id, None)
            for layer in range(len(self._spec.layers)):
                self._pairs.pop((request_id, layer), None)

    @property
    def kv_usage(self) -> KVUsage:
        held = sum(self._lengths.values()) * self._spec.bytes_per_token()
        return KVUsage(held, peak_held=max(held, self._peak), peak_pool=max(held, self._peak))

    def _appended(
        self, request_id: str, layer: int, num_cached: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the row, ``[kv_len, num_kv_heads, dim]``, with the new ones after the cached ones."""
        old = self._pairs.get((request_id, layer), (key[:0], value[:0]))
        pair = (torch.cat([old[0][:num_cached], key]), torch.cat([old[1][:num_cached], value]))
        self._pairs[request_id, layer] = pair
        return pair
