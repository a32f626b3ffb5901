"""Ragged verification: a paged KV pool, one write position per sequence, no padded input."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, KVUsage, PackedInputs, StepPlan
from emssd.attention.paged import reserve_pages
from emssd.attention.pages import PageTable
from emssd.errors import ConfigError
from emssd_ragged import Kernels
from emssd_ragged.fused import FusedAttention, FusedPlan, padded_bytes_per_token, why_not_fused
from emssd_ragged.grouped import GroupedAttention, GroupedPlan

__all__ = ["RaggedBackend", "RaggedPlan"]


@dataclass(slots=True)
class RaggedPlan(StepPlan):
    """One step, and what its attention reads."""

    attention: FusedPlan | GroupedPlan


class RaggedBackend(AttentionBackend):
    """KV pages in a pool that grows with what sequences hold; attention in C++ where it can be, else in PyTorch.

    Args:
        page_size: tokens per page.
        kernels: ``fused`` computes a layer's attention in one C++ call, for CPUs; ``torch`` in PyTorch, anywhere;
            ``auto`` takes the first that can serve the model.
    """

    def __init__(self, page_size: int = 16, kernels: Kernels | str = Kernels.auto) -> None:
        if page_size < 1:
            raise ConfigError(f"backend.page_size is {page_size}; it must be at least 1")
        try:
            self._kernels = Kernels(kernels)
        except ValueError:
            names = ", ".join(each.value for each in Kernels)
            raise ConfigError(f"backend.kernels is {kernels!r}; choose {names}") from None
        self._table = PageTable(page_size)
        self._usage = KVUsage()

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        if self._kernels is not Kernels.fused:
            return []
        reason = why_not_fused(spec, self._table.page_size)
        return [] if reason is None else [f"{reason}; kernels=torch serves it"]

    def allocate(self, spec: KVCacheSpec) -> None:
        self._device = spec.device
        fused = self._kernels is not Kernels.torch and not self._says_why_not(spec)
        self._attention = FusedAttention(spec) if fused else GroupedAttention(spec, self._table.page_size)
        if spec.max_tokens is not None:
            self._table.max_pages = spec.max_tokens * spec.bytes_per_token() // self._attention.page_bytes

    def bytes_per_token(self, spec: KVCacheSpec) -> int:
        fused = self._kernels is not Kernels.torch and why_not_fused(spec, self._table.page_size) is None
        return padded_bytes_per_token(spec) if fused else spec.bytes_per_token()

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._table.fits(kv_lens.values())

    def plan(self, packed: PackedInputs) -> RaggedPlan:
        reserve_pages(self._table, packed)
        self._grow_pool()
        attention = self._attention.plan(packed, self._table)
        watch = attention.watch if isinstance(attention, GroupedPlan) else None
        return RaggedPlan(
            input_ids=packed.input_ids.unsqueeze(0),
            position_ids=packed.position_ids.unsqueeze(0),
            logits_to_keep=packed.logit_rows,
            logit_index=None,
            num_padding=0,
            replay=None if watch is None else watch.run,
            attention=attention,
        )

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(plan, RaggedPlan)
        return self._attention.forward(plan.attention, layer, query, key, value)  # type: ignore[arg-type]  # its own plan

    def commit(self, kept: Kept) -> int:
        for request_id, kv_len in zip(kept.request_ids, kept.kv_lens, strict=True):
            self._table.truncate(request_id, kv_len)
        return 0

    def release(self, request_ids: Iterable[str]) -> None:
        self._table.release(request_ids)

    @property
    def kv_usage(self) -> KVUsage:
        held = self._table.num_used * self._attention.page_bytes
        return KVUsage(held, self._usage.peak_held, self._usage.peak_pool)

    def _says_why_not(self, spec: KVCacheSpec) -> bool:
        """Whether the fused kernel must be done without; on a CPU, where that costs time, with a word about it."""
        reason = why_not_fused(spec, self._table.page_size)
        if reason is not None and spec.device.type == "cpu" and self._table.page_size == 16:
            warnings.warn(
                f"attention runs in PyTorch, which takes several times as long as the fused kernel: {reason}. "
                f"backend.kernels=torch does so without this warning",
                RuntimeWarning,
                stacklevel=2,
            )
        return reason is not None

    def _grow_pool(self) -> None:
        """Make the pool as large as the page table, with an eighth to spare so that copying stays rare."""
        pools = self._attention.pools
        # The smallest: where memory ran out, some were enlarged and others not.
        have = min(layer.shape[0] for pool in pools for layer in pool)
        if have < self._table.num_pages:
            want = max(self._table.num_pages, min(have + have // 8, self._table.max_pages or have + have // 8))
            for pool in pools:
                for layer, old in enumerate(pool):
                    pool[layer] = torch.cat([old, old.new_zeros(max(0, want - len(old)), *old.shape[1:])])
        page_bytes = self._attention.page_bytes
        self._usage = KVUsage(
            peak_held=max(self._usage.peak_held, self._table.num_used * page_bytes),
            peak_pool=max(self._usage.peak_pool, self._attention.pools[0][0].shape[0] * page_bytes),
        )
