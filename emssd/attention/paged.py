"""What a paged attention kernel reads for one step, and what a family of such kernels has to offer; pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from emssd.attention.interface import KVCacheSpec, LayerSpec
from emssd.attention.packed import PackedInputs
from emssd.attention.pages import PageTable

__all__ = [
    "FixedShape",
    "PagedAttention",
    "PagedKernels",
    "PagedMetadata",
    "largest_metadata",
    "page_metadata",
    "reserve_pages",
    "tree_mask",
]


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """The page tables of one step, on the host, in the layout of FlashInfer and others.

    Row ``i`` has the queries ``qo_indptr[i]:qo_indptr[i + 1]`` and the pages at ``kv_indptr[i]:kv_indptr[i + 1]`` of
    `kv_indices`, all full but the last. Its queries are the last of its KV: query ``j`` stands at
    ``kv_len - q_len + j``.

    Attributes:
        qo_indptr: ``[B + 1]`` int32.
        kv_indptr: ``[B + 1]`` int32, in pages.
        kv_indices: ``[kv_indptr[B]]`` int32, pages of the pool.
        kv_last_page_len: ``[B]`` int32, tokens in the last page: 1 to `page_size`, 0 for a row without pages.
        slots: ``[nnz]`` int64, where the new tokens' KV goes: ``page * page_size + offset``.
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
        """The same with rows of no query and no page behind, for kernels whose number of rows is fixed."""
        absent = num_rows - (len(self.qo_indptr) - 1)
        assert absent >= 0, f"{len(self.qo_indptr) - 1} rows where {num_rows} are the most"
        return PagedMetadata(
            qo_indptr=torch.cat([self.qo_indptr, self.qo_indptr[-1:].expand(absent)]),
            kv_indptr=torch.cat([self.kv_indptr, self.kv_indptr[-1:].expand(absent)]),
            kv_indices=self.kv_indices,
            kv_last_page_len=torch.cat([self.kv_last_page_len, self.kv_last_page_len.new_zeros(absent)]),
            slots=self.slots,
            page_size=self.page_size,
        )


def reserve_pages(table: PageTable, packed: PackedInputs) -> None:
    """Give the rows of a step their pages. What a step that was planned and not committed took is given back first."""
    for request_id, length, kv_len in zip(packed.request_ids, packed.lengths, packed.kv_lens, strict=True):
        table.truncate(request_id, kv_len - length)
    for request_id, kv_len in zip(packed.request_ids, packed.kv_lens, strict=True):
        table.reserve(request_id, kv_len)


def page_metadata(table: PageTable, packed: PackedInputs) -> PagedMetadata:
    """The metadata of one step, whose new tokens have been reserved in `table`."""
    kv_indices: list[int] = []
    kv_indptr = [0]
    slots: list[int] = []
    for request_id, length, kv_len in zip(packed.request_ids, packed.lengths, packed.kv_lens, strict=True):
        pages = table.pages(request_id)[: -(-kv_len // table.page_size)]
        kv_indices.extend(pages)
        kv_indptr.append(len(kv_indices))
        slots.extend(table.slots(request_id, kv_len - length, kv_len))
    return PagedMetadata(
        qo_indptr=torch.tensor(packed.qo_indptr, dtype=torch.int32),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        kv_indices=torch.tensor(kv_indices, dtype=torch.int32),
        kv_last_page_len=torch.tensor([(kv_len - 1) % table.page_size + 1 for kv_len in packed.kv_lens]).int(),
        slots=torch.tensor(slots, dtype=torch.int64),
        page_size=table.page_size,
    )


class Trees(Protocol):
    """What `tree_mask` reads of a draft."""

    @property
    def lengths(self) -> list[int]: ...
    @property
    def indptr(self) -> tuple[int, ...]: ...
    @property
    def parents(self) -> tuple[int, ...] | None: ...


def tree_mask(packed: PackedInputs, draft: Trees, sliding_window: int | None = None) -> torch.Tensor:
    """Who sees whom when drafts are trees: a node sees the cached tokens, its ancestors and itself.

    Args:
        packed: a step whose rows end with the nodes of `draft`; any tokens before them are a chain.
        draft: trees for these rows.
        sliding_window: a token sees so many latest positions, by depth in the tree; ``None`` for all.

    Returns:
        ``[sum(q_len * kv_len)]`` bool: row by row of the batch, row-major ``[q_len, kv_len]``, true where seen.
    """
    masks = []
    for row, (q_len, kv_len, num_nodes) in enumerate(zip(packed.lengths, packed.kv_lens, draft.lengths, strict=True)):
        num_cached, first_node = kv_len - q_len, q_len - num_nodes
        parents = list(range(-1, q_len - 1))
        if draft.parents is not None:
            start = draft.indptr[row]
            parents[first_node:] = [first_node + node for node in draft.parents[start : start + num_nodes]]
        mask = torch.ones(q_len, kv_len, dtype=torch.bool)
        mask[:, num_cached:] = torch.eye(q_len, dtype=torch.bool)
        positions = torch.arange(kv_len)
        for query, parent in enumerate(parents):
            if parent >= 0:
                mask[query, num_cached:] |= mask[parent, num_cached:]
                positions[num_cached + query] = positions[num_cached + parent] + 1
            else:
                positions[num_cached + query] = num_cached
        if sliding_window is not None:
            mask &= positions > positions[num_cached:, None] - sliding_window
        masks.append(mask.flatten())
    return torch.cat(masks)


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The limits of a kernel that is recorded once and replayed, as a CUDA graph is.

    Attributes:
        num_rows: rows of every plan, absent ones included.
        num_tokens, num_pages: the most queries, and the most pages, of a plan.
    """

    num_rows: int
    num_tokens: int
    num_pages: int


def largest_metadata(shape: FixedShape, page_size: int) -> PagedMetadata:
    """A plan with all rows and queries of `shape`; every page is page 0, so it is for planning, not for running."""
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


class PagedAttention(Protocol):
    """Attention by the rules of one layer: planned once a step, run for every layer that has these rules."""

    def plan(self, metadata: PagedMetadata, mask: torch.Tensor | None = None) -> None:
        """Prepare a step.

        Without `mask` (``[sum(q_len * kv_len)]`` bool) attention is causal, within the layer's window if it has one;
        a mask replaces both rules. Made for a fixed shape, it takes metadata with exactly that number of rows.
        """

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Attend; queries beyond those that were planned leave their rows of `out` as they are.

        Args:
            query: ``[n, num_qo_heads, dim]``, ``n >= nnz``.
            keys, values: ``[pages, page_size, num_kv_heads, dim]``, with the new tokens in their slots.
            out: ``[n, num_qo_heads, dim]``, written.
        """


class PagedKernels(Protocol):
    """A family of paged attention kernels.

    Attributes:
        head_dims: elements per head that the kernels take, ascending; heads in between are padded with zeros.
    """

    head_dims: tuple[int, ...]

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        """Reasons, in words, why the kernels cannot serve `spec`, head dimensions aside."""

    def allocate(self, spec: KVCacheSpec, page_size: int) -> None:
        """Take the memory that the kernels need besides the KV cache. Called once, before `attention`."""

    def attention(self, layer: LayerSpec, *, masked: bool = False, shape: FixedShape | None = None) -> PagedAttention:
        """Attention by the rules of `layer`, whose dimensions are padded already and whose scale is the true one.

        Args:
            layer: shape and rules.
            masked: whether it is always planned with a mask.
            shape: of a kernel to be recorded.
        """
