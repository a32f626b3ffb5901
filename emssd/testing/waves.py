"""Queries, keys and values without a model: functions of each token's id, so that tokens can be told apart."""

from __future__ import annotations

import torch

from emssd.attention import KVCacheSpec

__all__ = ["Waves"]


class Waves:
    """For tests of backends: ids stand for tokens ever fed, and each has its own query, key and value in each layer."""

    def __init__(self, spec: KVCacheSpec, seed: int) -> None:
        self._spec = spec
        self._generator = torch.Generator().manual_seed(seed)
        self._known: dict[tuple[int, str], torch.Tensor] = {}

    def qkv(self, ids: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[n, heads, dim]`` queries, keys and values of ``ids [n]``."""
        rules = self._spec.layers[layer]
        return (
            self._wave(ids, layer, "query", rules.num_qo_heads, rules.key_dim),
            self._wave(ids, layer, "key", rules.num_kv_heads, rules.key_dim),
            self._wave(ids, layer, "value", rules.num_kv_heads, rules.value_dim),
        )

    def _wave(self, ids: torch.Tensor, layer: int, what: str, heads: int, dim: int) -> torch.Tensor:
        if (layer, what) not in self._known:
            self._known[layer, what] = torch.randn(2, heads, dim, generator=self._generator, dtype=torch.float64)
        frequency, phase = self._known[layer, what].to(ids.device)
        return (1.5 * torch.sin(ids[:, None, None] * (1.0 + frequency) + phase)).to(self._spec.dtype)
