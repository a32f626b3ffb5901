"""What a paged attention kernel reads in one step: page tables and tree masks, computed from host integers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from emssd.attention.packed import PackedInputs
from emssd.attention.pages import PageTable
from emssd.attention.trees import ancestors

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
        kv_indices: ``[kv_indptr[B]]`` int32, pages of the pool.
        kv_last_page_len: ``[B]`` int32, tokens in the last page: 1 to `page_size`, or 0 for a row without pages.
        slots: ``[nnz]`` int64, where the KV of the new tokens goes: ``page * page_size + offset``.
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
        return int(self.qo_indptr.diff().max())

    @property
    def kv_lens(self) -> list[int]:
        """``[B]`` tokens of KV of each row."""
        full_pages = (self.kv_indptr.diff() - 1).clamp_min(0)
        return (full_pages * self.page_size + self.kv_last_page_len).tolist()

    def with_rows(self, num_rows: int) -> PagedMetadata:
        """The same, with rows added that have no query and no page, for kernels with a fixed number of rows."""
        absent = num_rows - (len(self.qo_indptr) - 1)
        assert absent >= 0, f"{len(self.qo_indptr) - 1} rows, and at most {num_rows} are possible"
        return PagedMetadata(
            qo_indptr=torch.cat([self.qo_indptr, self.qo_indptr[-1:].expand(absent)]),
            kv_indptr=torch.cat([self.kv_indptr, self.kv_indptr[-1:].expand(absent)]),
            kv_indices=self.kv_indices,
            kv_last_page_len=torch.cat([self.kv_last_page_len, self.kv_last_page_len.new_zeros(absent)]),
            slots=self.slots,
            page_size=self.page_size,
        )


def page_metadata(table: PageTable, packed: PackedInputs) -> PagedMetadata:
    """The metadata of one step. The pages of its new tokens are reserved in `table` already."""
    kv_indices: list[int] = []
    kv_indptr = [0]
    slots: list[int] = []
    for request_id, length, kv_len in zip(packed.request_ids, packed.lengths, packed.kv_lens, strict=True):
        pages = table.pages(request_id)[: -(-kv_len // table.page_size)]
        kv_indices.extend(pages)
        kv_indptr.append(len(kv_indices))
        slots.extend(table.slots(request_id, range(kv_len - length, kv_len)))
    return PagedMetadata(
        qo_indptr=torch.tensor(packed.qo_indptr, dtype=torch.int32),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        kv_indices=torch.tensor(kv_indices, dtype=torch.int32),
        kv_last_page_len=torch.tensor([(kv_len - 1) % table.page_size + 1 for kv_len in packed.kv_lens]).int(),
        slots=torch.tensor(slots, dtype=torch.int64),
        page_size=table.page_size,
    )


def tree_mask(packed: PackedInputs, sliding_window: int | None = None) -> torch.Tensor:
    """Which tokens each token sees: those before the tree, its ancestors and itself, or all up to itself in a chain.

    Args:
        packed: a step.
        sliding_window: a token sees this many of the latest positions, by depth in the tree; ``None`` for all.

    Returns:
        ``[sum(q_len * kv_len)]`` bool: for each row of the batch a row-major ``[q_len, kv_len]``, true if seen.
    """
    masks = []
    for row, (q_len, kv_len) in enumerate(zip(packed.lengths, packed.kv_lens, strict=True)):
        mask = torch.ones(kv_len, kv_len, dtype=torch.bool).tril_()
        if packed.trees is not None and (tree := packed.trees[row]):
            mask[-len(tree) :, -len(tree) :] = ancestors(tree)
        if sliding_window is not None:
            positions = torch.tensor(packed.kv_positions(row))
            mask &= positions > positions[:, None] - sliding_window
        masks.append(mask[kv_len - q_len :].flatten())
    return torch.cat(masks)


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The limits of a kernel that is recorded once and replayed, for example in a CUDA graph.

    Attributes:
        num_rows: rows of every plan, absent ones included.
        num_tokens, num_pages: a plan has at most this many queries, and at most this many pages.
    """

    num_rows: int
    num_tokens: int
    num_pages: int


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
