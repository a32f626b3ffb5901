"""Attention over a paged pool in pure PyTorch: rows of similar length attend together, padding is masked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from emssd.attention import KVCacheSpec, PackedInputs, additive_mask, masked_attention
from emssd.attention.pages import PageTable
from emssd.attention.seen import StepWatch
from emssd.attention.transfer import on_device

__all__ = ["GroupedAttention", "GroupedPlan", "RowGroup"]

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
class GroupedPlan:
    """One step: where the new KV goes (``slots [nnz]``), and who attends with whom.

    Attributes:
        watch: where looking at each layer's results would make the host wait; else ``None``.
    """

    slots: torch.Tensor
    groups: list[RowGroup]
    watch: StepWatch | None


class GroupedAttention:
    """Keys and values per layer, ``[pages, page_size, heads, dim]``, any dtype and device.

    Args:
        spec: of the cache.
        page_size: tokens per page.
    """

    def __init__(self, spec: KVCacheSpec, page_size: int) -> None:
        self._spec, self._page_size, self._watched = spec, page_size, spec.device.type != "cpu"
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        for layer in spec.layers:
            shape = (0, page_size, layer.num_kv_heads)
            self._keys.append(torch.zeros(*shape, layer.key_dim, dtype=spec.dtype, device=spec.device))
            self._values.append(torch.zeros(*shape, layer.value_dim, dtype=spec.dtype, device=spec.device))
        self.page_bytes = spec.bytes_per_token() * page_size
        self.pools = (self._keys, self._values)

    def plan(self, packed: PackedInputs, table: PageTable) -> GroupedPlan:
        """Arrange the rows of one step."""
        slots: list[int] = []
        for request_id, length, kv_len in zip(packed.request_ids, packed.lengths, packed.kv_lens, strict=True):
            slots.extend(table.slots(request_id, kv_len - length, kv_len))
        pages = [table.pages(request_id) for request_id in packed.request_ids]
        short = [row for row, length in enumerate(packed.lengths) if length <= _MAX_GROUPED_TOKENS]
        groups = self._by_length(pages, short)
        groups += [[row] for row, length in enumerate(packed.lengths) if length > _MAX_GROUPED_TOKENS]
        return GroupedPlan(
            on_device(slots, self._spec.device),
            [self._group(packed, pages, rows) for rows in groups],
            StepWatch() if self._watched else None,
        )

    def forward(
        self, plan: GroupedPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        out = self._attend(plan, layer, query, key, value)
        if plan.watch is not None:
            plan.watch.saw(out)
        return out

    def _attend(
        self, plan: GroupedPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        spec, checked = self._spec.layers[layer], plan.watch is None or not plan.watch.trusts
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
                group.mask(spec.sliding_window, self._page_size, query.dtype),
                spec,
                checked=checked,
            ).reshape(-1, spec.num_qo_heads, spec.value_dim)
            if group.output_index is not None:
                attended = attended[group.output_index]
            if out is None:
                return attended
            out[group.tokens] = attended
        assert out is not None
        return out

    def _by_length(self, page_rows: list[list[int]], rows: list[int]) -> list[list[int]]:
        """Rows that attend together: all of them, or apart where short ones would read much of nothing."""
        pages = {row: len(page_rows[row]) for row in rows}
        groups: list[list[int]] = []
        ordered = sorted(rows, key=pages.__getitem__, reverse=True)
        for place, row in enumerate(ordered):
            saved = (pages[groups[-1][0]] - pages[row]) * (len(ordered) - place) if groups else 0
            if not groups or saved * self._page_size >= _WORTH_A_CALL:
                groups.append([])
            groups[-1].append(row)
        return [sorted(group) for group in groups]

    def _group(self, packed: PackedInputs, pages_of: list[list[int]], rows: list[int]) -> RowGroup:
        """Arrange `rows` as a rectangle of queries over a rectangle of pages."""
        device, lengths = self._spec.device, packed.lengths
        longest, page_rows = max(lengths[row] for row in rows), [pages_of[row] for row in rows]
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
