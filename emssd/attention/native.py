"""`NativeStep`: what C++ code reads to attend in a step, where it needs no Python for that."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["NativeStep"]


class NativeStep(NamedTuple):
    """The attention of one step, in the order in which ``run_step`` of `emssd.native` takes it.

    Attributes:
        keys, values: by layer, the pool, as `emssd.attention.pool.KVPool` has it.
        query_indptr, kv_lens, page_indptr, pages: int32, see `emssd.attention.tables.PagedMetadata`.
        tree_indptr, parents: int32, the trees that rows end with; ``None`` if no row has any.
        scales, windows, softcaps, sinks: by layer, see `emssd.attention.LayerSpec`; 0 for no window and no cap.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query_indptr: torch.Tensor
    kv_lens: torch.Tensor
    page_indptr: torch.Tensor
    pages: torch.Tensor
    tree_indptr: torch.Tensor | None
    parents: torch.Tensor | None
    scales: list[float]
    windows: list[int]
    softcaps: list[float]
    sinks: list[torch.Tensor | None]
