"""Attention over pages in PyTorch: rows of similar length attend together, and padding is masked."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from emssd.attention import (
    KVCacheSpec,
    KVPool,
    LayerSpec,
    PackedInputs,
    PagedKernels,
    PageShapes,
    PageTable,
    StepMask,
    StepPlan,
    StepWatch,
    depths,
    hidden_nodes,
    masked_attention,
    on_device,
)

__all__ = ["GroupedKernels"]

# Rows with at most this many new tokens attend together in one call. A longer row, a prompt, has a call of its own, so
# that it pads no other row.
_MAX_GROUPED_TOKENS = 16
# Rows of different lengths attend in separate calls if this saves reading this many tokens of KV.
_WORTH_A_CALL = 384


@dataclass(slots=True)
class RowGroup:
    """Rows that attend in one call.

    Attributes:
        token_index: ``[r, n]`` int64 into the ``nnz`` tokens; short rows repeat their last token. ``None`` if the group
            is all of the step's tokens in order.
        output_index: ``[m]`` int64, the places of the group's ``m`` real tokens in ``[r * n]``; ``None`` as above.
        tokens: ``[m]`` int64, the places of these tokens among the ``nnz``; ``None`` as above.
        num_rows: ``r``.
        pages: ``[r * p]`` int64, the pages of each row, padded with page 0.
        mask: of queries ``[r, n]`` over KV ``[r, p * page_size]``.
    """

    token_index: torch.Tensor | None
    output_index: torch.Tensor | None
    tokens: torch.Tensor | None
    num_rows: int
    pages: torch.Tensor
    mask: StepMask


@dataclass(slots=True)
class GroupedStep:
    """The inputs of `GroupedKernels.forward`.

    Attributes:
        slots: ``[nnz]`` int64, where the new KV goes.
        watch: of use on devices where a look at each layer's results would make the host wait.
    """

    slots: torch.Tensor
    groups: list[RowGroup]
    watch: StepWatch


class GroupedKernels(PagedKernels):
    """Pages ``[page_size, heads, dim]``, in any dtype and on any device."""

    takes_trees = True
    takes_sinks = True
    takes_devices = True

    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        return []

    def page_shapes(self, layer: LayerSpec, dtype: torch.dtype, page_size: int) -> PageShapes:
        page = (page_size, layer.num_kv_heads)
        return (*page, layer.key_dim), (*page, layer.value_dim)

    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        self._spec, self._watched, self._page_size = spec, spec.device.type != "cpu", pool.page_size
        self._keys, self._values = pool.keys, pool.values

    def take_sinks(self, layers: Seq[LayerSpec]) -> bool:
        self._spec = replace(self._spec, layers=tuple(layers))
        return True

    def plan(self, packed: PackedInputs, table: PageTable) -> StepPlan:
        slots: list[int] = []
        for request_id, length, kv_len in zip(packed.request_ids, packed.lengths, packed.kv_lens, strict=True):
            slots.extend(table.slots(request_id, range(kv_len - length, kv_len)))
        pages = [table.pages(request_id) for request_id in packed.request_ids]
        short = [row for row, length in enumerate(packed.lengths) if length <= _MAX_GROUPED_TOKENS]
        groups = self._by_length(pages, short)
        groups += [[row] for row, length in enumerate(packed.lengths) if length > _MAX_GROUPED_TOKENS]
        watch = StepWatch()
        inputs = packed.on(self._spec.device)
        rectangles = [self._group(packed, inputs.position_ids, pages, rows) for rows in groups]
        step = GroupedStep(on_device(slots, self._spec.device), rectangles, watch)
        return StepPlan.ragged(inputs, step, replay=watch.run if self._watched else None)

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        step: GroupedStep = plan.attention
        out = self._attend(step, layer, query, key, value)
        step.watch.saw(out)
        return out

    def _attend(
        self, step: GroupedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        spec = self._spec.layers[layer]
        keys, values = self._keys[layer], self._values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, step.slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, step.slots, value)
        out = query.new_empty(query.shape[0], spec.num_qo_heads, spec.value_dim) if len(step.groups) > 1 else None
        for group in step.groups:
            rows = group.num_rows
            attended = masked_attention(
                query.view(rows, -1, *query.shape[1:]) if group.token_index is None else query[group.token_index],
                keys.index_select(0, group.pages).view(rows, -1, *keys.shape[2:]),
                values.index_select(0, group.pages).view(rows, -1, *values.shape[2:]),
                group.mask.additive(spec.sliding_window, query),
                spec,
                checked=not step.watch.trusts,
            ).reshape(-1, spec.num_qo_heads, spec.value_dim)
            if group.output_index is not None:
                attended = attended[group.output_index]
            if out is None:
                return attended
            out[group.tokens] = attended
        assert out is not None
        return out

    def _by_length(self, page_rows: list[list[int]], rows: list[int]) -> list[list[int]]:
        """Rows that attend together: all of them, or short rows apart if they would read much padding."""
        pages = {row: len(page_rows[row]) for row in rows}
        groups: list[list[int]] = []
        ordered = sorted(rows, key=pages.__getitem__, reverse=True)
        for index, row in enumerate(ordered):
            saved = (pages[groups[-1][0]] - pages[row]) * (len(ordered) - index) if groups else 0
            if not groups or saved * self._page_size >= _WORTH_A_CALL:
                groups.append([])
            groups[-1].append(row)
        return [sorted(group) for group in groups]

    def _group(
        self, packed: PackedInputs, position_ids: torch.Tensor, pages_of: list[list[int]], rows: list[int]
    ) -> RowGroup:
        """Arrange `rows` as a rectangle of queries over a rectangle of pages."""
        device, lengths = self._spec.device, packed.lengths
        longest, page_rows = max(lengths[row] for row in rows), [pages_of[row] for row in rows]
        num_pages = max(len(pages) for pages in page_rows)
        pages = [page for row in page_rows for page in row + [0] * (num_pages - len(row))]
        page_index, num_slots = on_device(pages, device), num_pages * self._page_size
        if len(rows) == packed.num_rows and all(length == longest for length in lengths):
            mask = self._mask(packed, rows, position_ids.view(len(rows), longest), num_slots)
            return RowGroup(None, None, None, len(rows), page_index, mask)
        token_index, output_index = packed.rectangle(rows)
        index = on_device(token_index, device).view(len(rows), longest)
        return RowGroup(
            token_index=index,
            output_index=on_device(output_index, device),
            tokens=on_device([token_index[index] for index in output_index], device),
            num_rows=len(rows),
            pages=page_index,
            mask=self._mask(packed, rows, position_ids[index], num_slots),
        )

    def _mask(self, packed: PackedInputs, rows: list[int], positions: torch.Tensor, num_slots: int) -> StepMask:
        """The mask of the queries of `rows` at ``positions [r, n]``, over `num_slots` tokens of KV each."""
        device = self._spec.device
        trees = [packed.trees[row] for row in rows] if packed.trees is not None else []
        if not any(trees):
            return StepMask(positions, torch.arange(num_slots, device=device))
        key_positions = torch.arange(num_slots).repeat(len(rows), 1)  # after a row's KV they are beyond its queries
        branches = []
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            nodes = range(packed.kv_lens[row] - len(tree), packed.kv_lens[row])
            if tree:
                key_positions[index, nodes.start : nodes.stop] = nodes.start - 1 + torch.tensor(depths(tree))
            branches.append((tree, packed.lengths[row], nodes))
        hidden = hidden_nodes(branches, positions.shape[1], num_slots)
        return StepMask(positions, on_device(key_positions, device), on_device(hidden, device, torch.bool))
