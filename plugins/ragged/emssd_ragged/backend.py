"""Ragged verification in pure PyTorch: a paged KV pool, one write position per sequence, no padded input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from emssd.attention import (
    AttentionBackend,
    Kept,
    KVCacheSpec,
    KVUsage,
    StepPlan,
    additive_mask,
    masked_attention,
)
from emssd.errors import ConfigError
from emssd.packing import PackedInputs
from emssd.pages import PageTable
from emssd.transfer import on_device

__all__ = ["RaggedBackend", "RaggedPlan", "RowGroup"]

# Rows with at most this many new tokens attend together in one call; longer ones (prompts) each in their own, so that
# a long prompt beside decoding rows pads nobody.
_MAX_GROUPED_TOKENS = 16
# Rows of different lengths attend in separate calls if that saves reading this many tokens of KV.
_WORTH_A_CALL = 384


@dataclass(slots=True)
class RowGroup:
    """Rows that attend in one call.

    Attributes:
        token_index: ``[r, n]`` int64 into the ``nnz`` tokens; short rows repeat their last token. ``None`` if the group
            is all of the step's tokens in order.
        output_index: ``[m]`` int64, where the group's ``m`` real tokens lie in ``[r * n]``; ``None`` as above.
        tokens: ``[m]`` int64, which of the ``nnz`` tokens these are; ``None`` as above.
        num_rows: ``r``.
        pages: ``[r * p]`` int64, the pages of each row, filled up with page 0.
        positions: ``[r, n]`` int64.
        masks: by sliding window, ``[r, n, p * page_size]``, see `additive_mask`.
    """

    token_index: torch.Tensor | None
    output_index: torch.Tensor | None
    tokens: torch.Tensor | None
    num_rows: int
    pages: torch.Tensor
    positions: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, page_size: int, dtype: torch.dtype) -> torch.Tensor:
        """Which KV each query sees: all positions up to its own, within the window; built once a step."""
        if window not in self.masks:
            num_slots = self.pages.numel() // self.num_rows * page_size
            key_positions = torch.arange(num_slots, device=self.pages.device)
            queries = self.positions.unsqueeze(-1)
            mask = key_positions <= queries
            if window is not None:
                mask &= key_positions > queries - window
            self.masks[window] = additive_mask(mask, dtype)
        return self.masks[window]


@dataclass(slots=True)
class RaggedPlan(StepPlan):
    """One step: where the new KV goes (``slots [nnz]``), and who attends with whom."""

    slots: torch.Tensor
    groups: list[RowGroup]


class RaggedBackend(AttentionBackend):
    """Paged KV per layer, ``[pages, page_size, heads, dim]``, in a pool that grows with what sequences hold.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int = 16) -> None:
        if page_size < 1:
            raise ConfigError(f"backend.page_size is {page_size}; it must be at least 1")
        self._table = PageTable(page_size)
        self._usage = KVUsage()

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        return []

    def allocate(self, spec: KVCacheSpec) -> None:
        self._spec = spec
        if spec.max_tokens is not None:
            self._table.max_pages = spec.max_tokens // self._table.page_size
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        for layer in spec.layers:
            shape = (0, self._table.page_size, layer.num_kv_heads)
            self._keys.append(torch.zeros(*shape, layer.key_dim, dtype=spec.dtype, device=spec.device))
            self._values.append(torch.zeros(*shape, layer.value_dim, dtype=spec.dtype, device=spec.device))

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._table.fits(kv_lens.values())

    def plan(self, packed: PackedInputs) -> RaggedPlan:
        lengths = packed.lengths
        slots: list[int] = []
        for request_id, length, kv_len in zip(packed.request_ids, lengths, packed.kv_lens, strict=True):
            self._table.reserve(request_id, kv_len)
            slots.extend(self._table.slots(request_id, kv_len - length, kv_len))
        self._grow_pool()
        short = [row for row, length in enumerate(lengths) if length <= _MAX_GROUPED_TOKENS]
        groups = self._by_length(packed, short)
        groups += [[row] for row, length in enumerate(lengths) if length > _MAX_GROUPED_TOKENS]
        return RaggedPlan(
            input_ids=packed.input_ids.unsqueeze(0),
            position_ids=packed.position_ids.unsqueeze(0),
            logits_to_keep=packed.logit_rows,
            logit_index=None,
            num_padding=0,
            slots=on_device(slots, self._spec.device),
            groups=[self._group(packed, lengths, rows) for rows in groups],
        )

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(plan, RaggedPlan)
        spec = self._spec.layers[layer]
        keys, values = self._keys[layer], self._values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, plan.slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, plan.slots, value)
        out = query.new_empty(query.shape[0], spec.num_qo_heads, spec.value_dim) if len(plan.groups) > 1 else None
        for group in plan.groups:
            rows = group.num_rows
            attended = masked_attention(
                query.view(rows, -1, *query.shape[1:]) if group.token_index is None else query[group.token_index],
                keys.index_select(0, group.pages).view(rows, -1, *keys.shape[2:]),
                values.index_select(0, group.pages).view(rows, -1, *values.shape[2:]),
                group.mask(spec.sliding_window, self._table.page_size, query.dtype),
                spec,
            ).reshape(-1, spec.num_qo_heads, spec.value_dim)
            if group.output_index is not None:
                attended = attended[group.output_index]
            if out is None:
                return attended
            out[group.tokens] = attended
        assert out is not None
        return out

    def commit(self, kept: Kept) -> int:
        for request_id, kv_len in zip(kept.request_ids, kept.kv_lens, strict=True):
            self._table.truncate(request_id, kv_len)
        return 0

    def release(self, request_ids: Iterable[str]) -> None:
        self._table.release(request_ids)

    @property
    def kv_usage(self) -> KVUsage:
        page_bytes = self._spec.bytes_per_token() * self._table.page_size
        return KVUsage(self._table.num_used * page_bytes, self._usage.peak_held, self._usage.peak_pool)

    def _by_length(self, packed: PackedInputs, rows: list[int]) -> list[list[int]]:
        """Rows that attend together: all of them, or apart where short ones would read much of nothing."""
        pages = {row: len(self._table.pages(packed.request_ids[row])) for row in rows}
        groups: list[list[int]] = []
        ordered = sorted(rows, key=pages.__getitem__, reverse=True)
        for place, row in enumerate(ordered):
            saved = (pages[groups[-1][0]] - pages[row]) * (len(ordered) - place) if groups else 0
            if not groups or saved * self._table.page_size >= _WORTH_A_CALL:
                groups.append([])
            groups[-1].append(row)
        return [sorted(group) for group in groups]

    def _group(self, packed: PackedInputs, lengths: list[int], rows: list[int]) -> RowGroup:
        """Arrange `rows` as a rectangle of queries over a rectangle of pages."""
        device, longest = self._spec.device, max(lengths[row] for row in rows)
        page_rows = [self._table.pages(packed.request_ids[row]) for row in rows]
        num_pages = max(len(pages) for pages in page_rows)
        pages = [page for row in page_rows for page in row + [0] * (num_pages - len(row))]
        page_index = on_device(pages, device)
        if len(rows) == packed.num_rows and all(length == longest for length in lengths):
            return RowGroup(None, None, None, len(rows), page_index, packed.position_ids.view(len(rows), longest))
        token_index: list[int] = []
        output_index: list[int] = []
        tokens: list[int] = []
        for place, row in enumerate(rows):
            start, stop = packed.qo_indptr[row], packed.qo_indptr[row + 1]
            token_index.extend(range(start, stop))
            token_index.extend([stop - 1] * (longest - (stop - start)))
            output_index.extend(range(place * longest, place * longest + stop - start))
            tokens.extend(range(start, stop))
        index = on_device(token_index, device).view(len(rows), longest)
        return RowGroup(
            token_index=index,
            output_index=on_device(output_index, device),
            tokens=on_device(tokens, device),
            num_rows=len(rows),
            pages=page_index,
            positions=packed.position_ids[index],
        )

    def _grow_pool(self) -> None:
        """Make the pool as large as the page table, with an eighth to spare so that copying stays rare."""
        page_bytes = self._spec.bytes_per_token() * self._table.page_size
        if (have := self._keys[0].shape[0]) < self._table.num_pages:
            want = max(self._table.num_pages, min(have + have // 8, self._table.max_pages or have + have // 8))
            for pool in (self._keys, self._values):
                for layer, old in enumerate(pool):
                    pool[layer] = torch.cat([old, old.new_zeros(want - have, *old.shape[1:])])
        self._usage = KVUsage(
            peak_held=max(self._usage.peak_held, self._table.num_used * page_bytes),
            peak_pool=max(self._usage.peak_pool, self._keys[0].shape[0] * page_bytes),
        )
