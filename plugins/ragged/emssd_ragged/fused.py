"""Attention over pages in one C++ call per layer, on CPUs. The result of a query depends on its own row alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from emssd.attention import (
    KVCacheSpec,
    KVPool,
    LayerSpec,
    NativeStep,
    PackedInputs,
    PagedKernels,
    PageShapes,
    PageTable,
    StepPlan,
)
from emssd.native import load_kernels, why_unavailable

__all__ = ["PAGE_SIZE", "FusedKernels", "why_not_fused"]

PAGE_SIZE = 16  # one vector of scores
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def why_not_fused(spec: KVCacheSpec, page_size: int) -> str | None:
    """The reason why the kernel cannot serve this cache; ``None`` if it can. To answer, it may build the kernel."""
    if spec.device.type != "cpu":
        return f"the fused kernel is for CPUs, and the model is on {spec.device}"
    if spec.dtype not in _DTYPES:
        dtype = str(spec.dtype).removeprefix("torch.")
        return f"the fused kernel takes bfloat16, float32 and float64, and the model is {dtype}"
    if page_size != PAGE_SIZE:
        return f"the fused kernel has pages of {PAGE_SIZE} tokens, and backend.page_size is {page_size}"
    return why_unavailable()


@cache
def _step_class() -> Any:
    """No attribute of a backend, which may be copied."""
    return torch.classes.emssd_native.Step


class FusedKernels(PagedKernels):
    """A page is keys ``[heads, cells, 16, width]`` and values ``[heads, 16 / width, lanes, width]``.

    A cell holds the `width` neighbours that one instruction multiplies and adds up: two in bfloat16, else one. Keys
    are transposed within their page, so that a vector of them belongs to 16 tokens.
    """

    takes_trees = True
    takes_sinks = True
    takes_devices = True
    batch_invariant = True

    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        reason = why_not_fused(spec, page_size)
        return [] if reason is None else [f"{reason}; kernels=torch serves it"]

    def page_shapes(self, layer: LayerSpec, dtype: torch.dtype, page_size: int) -> PageShapes:
        width = 2 if dtype is torch.bfloat16 else 1
        key_cells, value_lanes = -(-layer.key_dim // width), -(-layer.value_dim // 16) * 16
        heads = layer.num_kv_heads
        return (heads, key_cells, PAGE_SIZE, width), (heads, PAGE_SIZE // width, value_lanes, width)

    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        self._move = load_kernels().move.default
        self._keys, self._values = pool.keys, pool.values
        self._wide = torch.promote_types(spec.dtype, torch.float32)
        self._scales = [layer.scale for layer in spec.layers]
        self._windows = [layer.sliding_window or 0 for layer in spec.layers]
        self._softcaps = [layer.softcap or 0.0 for layer in spec.layers]
        self.take_sinks(spec.layers)

    def take_sinks(self, layers: Seq[LayerSpec]) -> bool:
        every = [layer.sinks for layer in layers]
        self._sinks = [None if sinks is None else torch.tensor(sinks, dtype=self._wide) for sinks in every]
        return True

    def plan(self, packed: PackedInputs, table: PageTable) -> StepPlan:
        pages = [table.pages(request_id) for request_id in packed.request_ids]
        tree_indptr, parents = None, None
        if packed.trees is not None:
            tree_indptr = [0, *accumulate(map(len, packed.trees))]
            parents = [parent for tree in packed.trees for parent in tree]
        step = _step_class()(
            self._keys, self._values, packed.qo_indptr, packed.kv_lens,
            [0, *accumulate(map(len, pages))], [page for row in pages for page in row], tree_indptr, parents,
            self._scales, self._windows, self._softcaps, self._sinks,
        )  # fmt: skip
        return StepPlan.ragged(packed.on(packed.input_ids.device), step)

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = plan.attention.attend(query, key, value, layer)
        return out

    def native_step(self, plan: StepPlan) -> NativeStep:
        step: NativeStep = plan.attention
        return step

    def move(self, pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._move(pages, sources, targets, id(pages) in map(id, self._values))
