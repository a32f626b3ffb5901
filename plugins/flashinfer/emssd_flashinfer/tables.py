"""The inputs of a paged attention kernel in one step: page tables and tree masks, computed from host integers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from emssd.attention import PackedInputs, PageTable, ancestors, runs

__all__ = ["FixedShape", "PagedMetadata", "StepPages", "TreeMask", "largest_metadata", "step_pages", "tree_mask"]


class PagedMetadata(NamedTuple):
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
        """Queries ``nnz``."""
        return int(self.qo_indptr[-1])

    @property
    def max_q_len(self) -> int:
        return int(np.diff(self.qo_indptr.numpy()).max())

    @property
    def kv_lens(self) -> list[int]:
        """``[B]`` tokens of KV of each row."""
        full_pages = (self.kv_indptr.diff() - 1).clamp_min(0)
        return (full_pages * self.page_size + self.kv_last_page_len).tolist()


class StepPages(NamedTuple):
    """The arrays of a `PagedMetadata`, as integers of any type."""

    qo_indptr: NDArray[Any]
    kv_indptr: NDArray[Any]
    kv_indices: NDArray[np.int32]
    kv_last_page_len: NDArray[Any]
    slots: NDArray[np.int64]
    page_size: int

    def metadata(self) -> PagedMetadata:
        arrays = self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_last_page_len
        qo_indptr, kv_indptr, pages, last = (torch.from_numpy(array.astype(np.int32, copy=False)) for array in arrays)
        return PagedMetadata(qo_indptr, kv_indptr, pages, last, torch.from_numpy(self.slots), self.page_size)


def step_pages(table: PageTable, packed: PackedInputs) -> StepPages:
    """The page tables of one step. The pages of its new tokens are reserved in `table` already."""
    size, qo_indptr, kv_lens = table.page_size, np.array(packed.qo_indptr), np.array(packed.kv_lens)
    q_lens, num_pages = qo_indptr[1:] - qo_indptr[:-1], (kv_lens + (size - 1)) // size
    kv_indptr = np.empty(len(qo_indptr), np.int64)
    kv_indptr[0] = 0
    num_pages.cumsum(out=kv_indptr[1:])
    kv_indices = table.indices(packed.request_ids, num_pages.tolist())
    # Without trees, the positions of the tokens are their places in the KV.
    tokens = packed.position_ids.numpy() if packed.trees is None else runs(kv_lens - q_lens, q_lens)
    nth_page = tokens // size
    pages = kv_indices[kv_indptr[:-1].repeat(q_lens) + nth_page].astype(np.int64)
    slots = (pages - nth_page) * size + tokens
    return StepPages(qo_indptr, kv_indptr, kv_indices, kv_lens - (num_pages - 1) * size, slots, size)


class TreeMask(NamedTuple):
    """The tokens that each token sees: a bit for each, as kernels read them; the first is the lowest of its byte.

    Attributes:
        bits: uint8; each row of the batch begins a byte of its own: a row-major ``[q_len, kv_len]``, 1 if seen.
        indptr: ``[B + 1]`` where each row begins among them, in bytes.
    """

    bits: NDArray[np.uint8]
    indptr: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Seq[NDArray[np.uint8]]) -> TreeMask:
        return cls(np.concatenate(rows), np.array([0, *accumulate(map(len, rows))], dtype=np.int32))


def tree_mask(packed: PackedInputs, sliding_window: int | None = None) -> TreeMask:
    """A token sees those before the tree, its ancestors and itself, or all up to itself in a chain.

    Of these, it sees as many of the latest positions, by depth in the tree, as the `sliding_window` says.
    """
    rows = list[NDArray[np.uint8]]()
    for row, (q_len, kv_len) in enumerate(zip(packed.lengths, packed.kv_lens, strict=True)):
        mask = np.ones((q_len, kv_len), dtype=bool)
        mask[:, -q_len:] = np.tri(q_len, dtype=bool)
        if packed.trees is not None and (tree := packed.trees[row]):
            num_new = min(q_len, len(tree))
            mask[-num_new:, -len(tree) :] = ancestors(tree).numpy()[-num_new:]
        if sliding_window is not None:
            positions = np.array(packed.kv_positions(row))
            mask &= positions > positions[-q_len:, None] - sliding_window
        rows.append(np.packbits(mask, bitorder="little"))
    return TreeMask.of(rows)


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
