"""Attention over a paged pool in one C++ call per layer, on CPUs; each query's result depends on its own row alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from emssd.attention import KVCacheSpec, LayerSpec, PackedInputs
from emssd.attention.pages import PageTable
from emssd.native import load_kernels, why_unavailable

__all__ = ["PAGE_SIZE", "FusedAttention", "FusedPlan", "padded_bytes_per_token", "why_not_fused"]

PAGE_SIZE = 16  # of the kernel: one vector of scores
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def why_not_fused(spec: KVCacheSpec, page_size: int) -> str | None:
    """Why the kernel cannot serve this cache, in words; ``None`` if it can. It may be built for that."""
    if spec.device.type != "cpu":
        return f"the fused kernel is for CPUs, and the model is on {spec.device}"
    if spec.dtype not in _DTYPES:
        dtype = str(spec.dtype).removeprefix("torch.")
        return f"the fused kernel takes bfloat16, float32 and float64, and the model is {dtype}"
    if page_size != PAGE_SIZE:
        return f"the fused kernel has pages of {PAGE_SIZE} tokens, and backend.page_size is {page_size}"
    return why_unavailable()


def padded_bytes_per_token(spec: KVCacheSpec) -> int:
    """Bytes that a token takes in `FusedAttention`: keys fill whole cells, and values whole vectors."""
    elements = 0
    for layer in spec.layers:
        width, key_cells, value_lanes = _sizes(layer, spec.dtype)
        elements += layer.num_kv_heads * (key_cells * width + value_lanes)
    return elements * spec.dtype.itemsize


def _sizes(layer: LayerSpec, dtype: torch.dtype) -> tuple[int, int, int]:
    """Elements of a cell, cells of a key, and lanes of a value."""
    width = 2 if dtype is torch.bfloat16 else 1
    return width, -(-layer.key_dim // width), -(-layer.value_dim // 16) * 16


@dataclass(slots=True)
class FusedPlan:
    """One step as the kernel reads it, all int32 and 1-D; see `emssd.attention.paged.PagedMetadata` for the terms."""

    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor


class FusedAttention:
    """Per layer keys ``[pages, heads, cells, 16, width]`` and values ``[pages, heads, 16 / width, lanes, width]``.

    A cell holds the `width` neighbours that one instruction multiplies and sums up: two in bfloat16, else one. Keys
    are transposed within their page, so that a vector of them belongs to 16 tokens.

    Args:
        spec: of the cache; one that `why_not_fused` has nothing against.
    """

    def __init__(self, spec: KVCacheSpec) -> None:
        self._layers, self._attend = spec.layers, load_kernels().attend.default
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        for layer in spec.layers:
            width, key_cells, value_lanes = _sizes(layer, spec.dtype)
            heads = layer.num_kv_heads
            self._keys.append(torch.zeros(0, heads, key_cells, PAGE_SIZE, width, dtype=spec.dtype))
            self._values.append(torch.zeros(0, heads, PAGE_SIZE // width, value_lanes, width, dtype=spec.dtype))
        self.page_bytes = padded_bytes_per_token(spec) * PAGE_SIZE
        self.pools = (self._keys, self._values)

    def plan(self, packed: PackedInputs, table: PageTable) -> FusedPlan:
        """The page tables of one step."""
        pages = [table.pages(request_id) for request_id in packed.request_ids]
        return FusedPlan(
            qo_indptr=_int32(packed.qo_indptr),
            kv_lens=_int32(packed.kv_lens),
            kv_indptr=_int32([0, *accumulate(map(len, pages))]),
            kv_indices=_int32([page for row in pages for page in row]),
        )

    def forward(
        self, plan: FusedPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        spec = self._layers[layer]
        out: torch.Tensor = self._attend(
            query, key, value, self._keys[layer], self._values[layer],
            plan.qo_indptr, plan.kv_lens, plan.kv_indptr, plan.kv_indices,
            spec.scale, spec.sliding_window or 0, spec.softcap or 0.0,
        )  # fmt: skip
        return out


def _int32(values: list[int] | tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
