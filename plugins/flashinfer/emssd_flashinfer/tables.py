"""The inputs of a paged attention kernel in one step: page tables and tree masks, computed from host integers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from emssd.attention import PackedInputs, PageTable, ancestors, runs

__all__ = [
    "FixedShape",
    "PagedMetadata",
    "largest_metadata",
    "page_metadata",
    "tree_mask",
]


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """The page tables of one step, on the host, in the layout of FlashInfer and others.

    Row ``i`` has the queries ``qo_indptr[i]:qo_indptr[i + 1]`` and the pages at ``kv_indptr[i]:kv_indptr[i + 1]`` of
    `kv_indices`; all but the last page are full. Its queries are its latest tokens: query ``j`` stands at position
    ``kv_len - q_len + j``.

    Attributes:
        qo_indptr: ``[B + 1]`` int32.
        kv_indptr: ``[B + 1]`` int32, in pages.
        kv_indices: ``[kv_indptr[B]]`` int32, pages of the pool. In a recorded step it is on the device already.
        kv_last_page_len: ``[B]`` int32, tokens in the last page: 1 to `page_size`, or 0 for a row without pages.
        slots: ``[nnz]`` int64, where the KV of the new tokens goes: ``page * page_size + offset``. In a recorded step
            it is on the device, and padded.
        page_size: tokens per page.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    slots: torch.Tensor
    page_size: int

    @property
    def num_tokens(self) -> int:
        """Number of queries ``nnz``."""
        return int(self.qo_indptr[-1])

    @property
    def max_q_len(self) -> int:
        """Queries of the longest row."""
        return int(np.diff(self.qo_indptr.numpy()).max())

    @property
    def kv_lens(self) -> list[int]:
        """``[B]`` tokens of KV of each row."""
        full_pages = (self.kv_indptr.diff() - 1).clamp_min(0)
        return (full_pages * self.page_size + self.kv_last_page_len).tolist()


def page_metadata(table: PageTable, packed: PackedInputs) -> PagedMetadata:
    """The metadata of one step. The pages of its new tokens are reserved in `table` already."""
    size, qo_indptr, kv_lens = table.page_size, np.array(packed.qo_indptr), np.array(packed.kv_lens)
    q_lens, num_pages = np.diff(qo_indptr), -(-kv_lens // size)
    kv_indptr = np.concatenate([_ZERO, num_pages.cumsum()])
    kv_indices = table.indices(packed.request_ids, num_pages.tolist())
    # Without trees, the positions of the tokens are their places in the KV.
    tokens = packed.position_ids.numpy() if packed.trees is None else runs(kv_lens - q_lens, q_lens)
    pages = kv_indices[np.repeat(kv_indptr[:-1], q_lens) + tokens // size].astype(np.int64)
    return PagedMetadata(
        qo_indptr=_int32(qo_indptr),
        kv_indptr=_int32(kv_indptr),
        kv_indices=torch.from_numpy(kv_indices),
        kv_last_page_len=_int32((kv_lens - 1) % size + 1),
        slots=torch.from_numpy(pages * size + tokens % size),
        page_size=size,
    )


_ZERO = np.zeros(1, dtype=np.int64)


def _int32(values: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


def tree_mask(packed: PackedInputs, sliding_window: int | None = None) -> torch.Tensor:
    """The tokens that each token sees: those before the tree, its ancestors and itself, or all up to itself in a chain.

    Args:
        packed: a step.
        sliding_window: a token sees this many of the latest positions, by depth in the tree; ``None`` for all.

    Returns:
        ``[sum(q_len * kv_len)]`` bool: for each row of the batch a row-major ``[q_len, kv_len]``, true if seen.
    """
    sizes = [q_len * kv_len for q_len, kv_len in zip(packed.lengths, packed.kv_lens, strict=True)]
    masks, start = np.ones(sum(sizes), dtype=bool), 0
    for row, (q_len, size) in enumerate(zip(packed.lengths, sizes, strict=True)):
        mask = masks[start : start + size].reshape(q_len, -1)
        start += size
        mask[:, -q_len:] = np.tri(q_len, dtype=bool)
        if packed.trees is not None and (tree := packed.trees[row]):
            num_new = min(q_len, len(tree))
            mask[-num_new:, -len(tree) :] = ancestors(tree).numpy()[-num_new:]
        if sliding_window is not None:
            positions = np.array(packed.kv_positions(row))
            mask &= positions > positions[-q_len:, None] - sliding_window
    return torch.from_numpy(masks)


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The limits of a kernel that is recorded once and replayed, for example in a CUDA graph.

    Attributes:
        num_rows: rows of every plan, absent ones included.
        num_tokens, num_pages: a plan has at most this many queries, and at most this many pages.
        max_kv_len: no row with a tree has more tokens of KV. Rows of causal plans may.
    """

    num_rows: int
    num_tokens: int
    num_pages: int
    max_kv_len: int = 0


def largest_metadata(shape: FixedShape, page_size: int) -> PagedMetadata:
    """A plan with all rows and queries of `shape`. All pages are page 0: plan with it, do not run it."""
    q_lens = [shape.num_tokens - shape.num_rows + 1] + [1] * (shape.num_rows - 1)
    num_pages = [-(-length // page_size) for length in q_lens]
    return PagedMetadata(
        qo_indptr=torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32),
        kv_indptr=torch.tensor([0, *accumulate(num_pages)], dtype=torch.int32),
        kv_indices=torch.zeros(sum(num_pages), dtype=torch.int32),
        kv_last_page_len=torch.tensor([(length - 1) % page_size + 1 for length in q_lens], dtype=torch.int32),
        slots=torch.zeros(shape.num_tokens, dtype=torch.int64),
        page_size=page_size,
    )
