"""Attention over pages in one C++ call per layer, on CPUs. The result of a query depends on its own row alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from emssd.attention import KVCacheSpec, LayerSpec, PackedInputs, PagedKernels, StepPlan
from emssd.attention.native import NativeStep
from emssd.attention.pages import PageTable
from emssd.attention.pool import KVPool, PageShapes
from emssd.native import load_kernels, why_unavailable

__all__ = ["PAGE_SIZE", "FusedKernels", "FusedTables", "why_not_fused"]

PAGE_SIZE = 16  # one vector of scores
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def why_not_fused(spec: KVCacheSpec, page_size: int) -> str | None:
    """Why the kernel cannot serve this cache, in words; ``None`` if it can. To answer, it may build the kernel."""
    if spec.device.type != "cpu":
        return f"the fused kernel is for CPUs, and the model is on {spec.device}"
    if spec.dtype not in _DTYPES:
        dtype = str(spec.dtype).removeprefix("torch.")
        return f"the fused kernel takes bfloat16, float32 and float64, and the model is {dtype}"
    if page_size != PAGE_SIZE:
        return f"the fused kernel has pages of {PAGE_SIZE} tokens, and backend.page_size is {page_size}"
    return why_unavailable()


@dataclass(slots=True)
class FusedTables:
    """One step as the kernel reads it, all int32 and 1-D; see `emssd.attention.tables.PagedMetadata` for the terms.

    The parents of all rows' trees stand one after another; there are none if no row has a tree.
    """

    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    tree_indptr: torch.Tensor | None = None
    parents: torch.Tensor | None = None


class FusedKernels(PagedKernels):
    """A page is keys ``[heads, cells, 16, width]`` and values ``[heads, 16 / width, lanes, width]``.

    A cell holds the `width` neighbours that one instruction multiplies and adds up: two in bfloat16, else one. Keys
    are transposed within their page, so that a vector of them belongs to 16 tokens.
    """

    takes_trees = True
    takes_sinks = True
    takes_devices = True
    are_native = True

    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        reason = why_not_fused(spec, page_size)
        return [] if reason is None else [f"{reason}; kernels=torch serves it"]

    def page_shapes(self, layer: LayerSpec, dtype: torch.dtype, page_size: int) -> PageShapes:
        width = 2 if dtype is torch.bfloat16 else 1
        key_cells, value_lanes = -(-layer.key_dim // width), -(-layer.value_dim // 16) * 16
        heads = layer.num_kv_heads
        return (heads, key_cells, PAGE_SIZE, width), (heads, PAGE_SIZE // width, value_lanes, width)

    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        kernels = load_kernels()
        self._attend, self._move = kernels.attend.default, kernels.move.default
        self._keys, self._values = pool.keys, pool.values
        wide = torch.promote_types(spec.dtype, torch.float32)
        self._scales = [layer.scale for layer in spec.layers]
        self._windows = [layer.sliding_window or 0 for layer in spec.layers]
        self._softcaps = [layer.softcap or 0.0 for layer in spec.layers]
        self._sinks = [None if layer.sinks is None else torch.tensor(layer.sinks, dtype=wide) for layer in spec.layers]

    def plan(self, packed: PackedInputs, table: PageTable) -> StepPlan:
        pages = [table.pages(request_id) for request_id in packed.request_ids]
        tables = FusedTables(
            qo_indptr=_int32(packed.qo_indptr),
            kv_lens=_int32(packed.kv_lens),
            kv_indptr=_int32([0, *accumulate(map(len, pages))]),
            kv_indices=_int32([page for row in pages for page in row]),
        )
        if packed.trees is not None:
            tables.tree_indptr = _int32([0, *accumulate(map(len, packed.trees))])
            tables.parents = _int32([parent for tree in packed.trees for parent in tree])
        return StepPlan.ragged(packed.on(packed.input_ids.device), tables)

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        tables: FusedTables = plan.attention
        out: torch.Tensor = self._attend(
            query, key, value, self._keys[layer], self._values[layer],
            tables.qo_indptr, tables.kv_lens, tables.kv_indptr, tables.kv_indices, tables.tree_indptr, tables.parents,
            self._scales[layer], self._windows[layer], self._softcaps[layer], self._sinks[layer],
        )  # fmt: skip
        return out

    def native_step(self, plan: StepPlan) -> NativeStep:
        tables: FusedTables = plan.attention
        return NativeStep(
            self._keys, self._values,
            tables.qo_indptr, tables.kv_lens, tables.kv_indptr, tables.kv_indices, tables.tree_indptr, tables.parents,
            self._scales, self._windows, self._softcaps, self._sinks,
        )  # fmt: skip

    def move(self, pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._move(pages, sources, targets, any(pages is values for values in self._values))


def _int32(values: list[int] | tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
