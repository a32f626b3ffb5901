"""Vanilla batched verification over a rectangular KV slab. Each padding can be switched off (paper §3.1, Table 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from emssd.attention import (
    AttentionBackend,
    Kept,
    KVCacheSpec,
    KVUsage,
    LayerSpec,
    PackedInputs,
    StepMask,
    StepPlan,
    StepWatch,
    hidden_nodes,
    masked_attention,
    on_device,
)

__all__ = ["PaddedBackend"]

_HOLE = torch.iinfo(torch.int64).max // 2  # a token position that no query reaches
_SLOT_ROUNDING = 64  # the slab grows in steps of this many slots
_ALIGNMENT = 8  # slots; a divisor of `_SLOT_ROUNDING`


@dataclass(slots=True)
class PaddedStep:
    """The inputs of `PaddedBackend.forward`: queries ``[B, n_max]`` attend over keys ``[B, slots]``.

    Attributes:
        token_index: ``[B * n_max]`` int64, the fed tokens of the rectangle of queries; after the end of a row its last
            token is repeated. ``None`` if the fed tokens are the rectangle.
        output_index: ``[nnz]`` int64, where each fed token is in the rectangle; ``None`` as above.
        rows: ``[B]`` slab rows; a slice if they are the first ``B`` in order.
        write_rows, write_slots: ``[b * n]`` int64, where the KV of each fed token goes.
        mask: of queries ``[B, n_max]`` over slots; the positions of holes are out of reach.
        watch: of use on devices where a look at each layer's results would make the host wait.
    """

    token_index: torch.Tensor | None
    output_index: torch.Tensor | None
    rows: torch.Tensor | slice
    write_rows: torch.Tensor
    write_slots: torch.Tensor
    mask: StepMask
    watch: StepWatch


class PaddedBackend(AttentionBackend):
    """A slab ``[rows, slots, heads, dim]`` per layer and one masked attention call over the whole rectangle.

    With both paddings off it computes the same as `ragged`, in these kernels, as the ablation asks.
    """

    takes_trees = True
    takes_sinks = True
    takes_devices = True

    def __init__(self, *, pad_kv: bool = True, pad_inputs: bool = True) -> None:
        self._pad_kv = pad_kv
        self._pad_inputs = pad_inputs
        self._table = SlabTable(pad_kv)
        self._holes_before = self._padding = self._peak_held = self._peak_pool = 0

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        reasons = []
        if spec.continuous:
            reasons.append("its rows form one rectangle, so a batch is refilled only when all of them are done")
        if spec.max_tokens is not None:
            reasons.append("the number of slots that its holes take cannot be foreseen, so it keeps no memory limit")
        return reasons

    def allocate(self, spec: KVCacheSpec) -> None:
        def empty(heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(0, 0, heads, dim, dtype=spec.dtype, device=spec.device)

        self._spec, self._watched = spec, spec.device.type != "cpu"
        self._positions = torch.full((0, 0), _HOLE, dtype=torch.int64, device=spec.device)
        self._keys = [empty(layer.num_kv_heads, layer.key_dim) for layer in spec.layers]
        self._values = [empty(layer.num_kv_heads, layer.value_dim) for layer in spec.layers]

    def take_sinks(self, layers: Sequence[LayerSpec]) -> bool:
        self._spec = replace(self._spec, layers=tuple(layers))
        return True

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return True

    def plan(self, packed: PackedInputs) -> StepPlan:
        rows, lengths = self._table.rows(packed.request_ids), packed.lengths
        before = [kv_len - new for kv_len, new in zip(packed.kv_lens, lengths, strict=True)]
        if any(len(self._table.slots(name)) > count for name, count in zip(packed.request_ids, before, strict=True)):
            self._drop(packed.request_ids, before)  # of a step that was planned and failed
        longest = max(lengths)
        self._holes_before = self._table.num_holes
        starts = [self._table.write_start(request_id) for request_id in packed.request_ids]
        self._reserve(max(starts) + longest)
        for request_id, start, length in zip(packed.request_ids, starts, lengths, strict=True):
            self._table.slots(request_id).extend(range(start, start + length))
        self._peak_held = max(self._peak_held, self.kv_usage.held)
        inputs = packed.on(self._spec.device)
        rectangle = packed.rectangle(range(len(rows)))
        token_index, output_index = map(self._index, rectangle)
        write_rows = self._index(rows).repeat_interleave(longest)
        write_slots = (self._index(starts).unsqueeze(1) + torch.arange(longest, device=token_index.device)).flatten()
        self._positions[write_rows[output_index], write_slots[output_index]] = inputs.position_ids
        rows_used = slice(len(rows)) if rows == list(range(len(rows))) else self._index(rows)
        key_positions = self._positions[rows_used, : self._width()]
        watch = StepWatch()
        replay = watch.run if self._watched else None
        positions = inputs.position_ids[token_index].view(len(rows), longest)
        step = PaddedStep(
            token_index=None if self._pad_inputs else token_index,
            output_index=None if self._pad_inputs else output_index,
            rows=rows_used,
            # A padding token writes its KV too, to a slot that is a hole or is overwritten later.
            write_rows=write_rows if self._pad_inputs else write_rows[output_index],
            write_slots=write_slots if self._pad_inputs else write_slots[output_index],
            mask=StepMask(positions, key_positions, self._hidden(packed, longest, key_positions.shape[1])),
            watch=watch,
        )
        if not self._pad_inputs:
            return StepPlan.ragged(inputs, step, replay)
        wanted = np.array(rectangle[1])[packed.logit_rows.numpy()]  # on the host: no wait
        keep, columns = np.unique(wanted % longest, return_inverse=True)
        return StepPlan(
            input_ids=inputs.input_ids[token_index].view(len(rows), longest),
            position_ids=positions,
            logits_to_keep=self._index(keep.tolist()),
            logit_index=self._index((wanted // longest * len(keep) + columns).tolist()),
            attention=step,
            replay=replay,
            token_index=output_index,
        )

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        step: PaddedStep = plan.attention
        spec, num_slots = self._spec.layers[layer], step.mask.key_positions.shape[1]
        keys, values = self._keys[layer], self._values[layer]
        keys[step.write_rows, step.write_slots] = key
        values[step.write_rows, step.write_slots] = value
        rectangle = query if step.token_index is None else query[step.token_index]
        out = masked_attention(
            rectangle.view(step.mask.positions.shape[0], -1, *query.shape[1:]),
            keys[step.rows, :num_slots],
            values[step.rows, :num_slots],
            step.mask.additive(spec.sliding_window, query),
            spec,
            checked=not step.watch.trusts,
        ).reshape(-1, spec.num_qo_heads, spec.value_dim)
        step.watch.saw(out)
        return out if step.output_index is None else out[step.output_index]

    def commit(self, kept: Kept) -> None:
        self._move(kept)
        self._drop(kept.request_ids, kept.kv_lens)
        self._padding = max(0, self._table.num_holes - self._holes_before) if self._pad_kv else 0

    def release(self, request_ids: Iterable[str]) -> None:
        before = self._table.num_rows
        stay = self._table.release(request_ids)
        if len(stay) < before:
            stay = [row for row in stay if row < len(self._positions)]  # memory may have run out before the latest came
            index = self._index(stay)
            for slab in (*self._keys, *self._values, self._positions):
                slab[: len(stay)] = slab[index]
            self._positions[len(stay) :] = _HOLE

    @property
    def kv_usage(self) -> KVUsage:
        held = self._table.num_rows * self._table.num_slots * self._spec.bytes_per_token()
        return KVUsage(held, self._peak_held, self._peak_pool, self._padding)

    def _width(self) -> int:
        """Slots that are attended to: those in use. On a GPU a few holes more, as its kernels align masks."""
        num_slots = self._table.num_slots
        return -(-num_slots // _ALIGNMENT) * _ALIGNMENT if self._watched else num_slots

    def _hidden(self, packed: PackedInputs, longest: int, width: int) -> torch.Tensor | None:
        """The slots that each query must not see, as they hold branches of its tree that are not its own."""
        if packed.trees is None:
            return None
        branches = [
            (tree, length, self._table.slots(name)[-len(tree) :] if tree else ())
            for tree, length, name in zip(packed.trees, packed.lengths, packed.request_ids, strict=True)
        ]
        return on_device(hidden_nodes(branches, longest, width), self._spec.device, torch.bool)

    def _move(self, kept: Kept) -> None:
        """Move the KV of accepted tree nodes to the slots where it would be if they had been a chain."""
        rows, sources, targets = list[int](), list[int](), list[int]()
        for request_id, before, after in kept.moves():
            slots = self._table.slots(request_id)
            rows.extend(self._table.rows([request_id]) * len(before))
            sources.extend(slots[token] for token in before)
            targets.extend(slots[token] for token in after)
        if rows:
            row, source, target = self._index(rows), self._index(sources), self._index(targets)
            for slab in (*self._keys, *self._values, self._positions):
                slab[row, target] = slab[row, source]

    def _drop(self, request_ids: Sequence[str], kv_lens: Sequence[int]) -> None:
        rows, slots = list[int](), list[int]()
        for row, request_id, kv_len in zip(self._table.rows(request_ids), request_ids, kv_lens, strict=True):
            dropped = self._table.truncate(request_id, kv_len)
            rows.extend([row] * len(dropped))
            slots.extend(dropped)
        if rows:
            self._positions[self._index(rows), self._index(slots)] = _HOLE

    def _index(self, values: list[int]) -> torch.Tensor:
        return on_device(values, self._spec.device)

    def _reserve(self, num_slots: int) -> None:
        """Make the slab at least ``[rows in use, num_slots]``."""
        rows, slots = self._positions.shape
        if rows < self._table.num_rows or slots < num_slots:
            rows = max(rows, self._table.num_rows)
            slots = max(slots, -(-num_slots // _SLOT_ROUNDING) * _SLOT_ROUNDING)
            for slabs in (self._keys, self._values):
                slabs[:] = [_enlarged(slab, rows, slots, 0) for slab in slabs]
            self._positions = _enlarged(self._positions, rows, slots, _HOLE)
        self._peak_pool = max(self._peak_pool, rows * slots * self._spec.bytes_per_token())


def _enlarged(old: torch.Tensor, rows: int, slots: int, fill: int) -> torch.Tensor:
    if old.shape[0] >= rows and old.shape[1] >= slots:  # an earlier call ran out of memory after this one
        return old
    new = old.new_full((max(rows, old.shape[0]), max(slots, old.shape[1]), *old.shape[2:]), fill)
    new[: old.shape[0], : old.shape[1]] = old
    return new


class SlabTable:
    """The slots of a slab with one row per sequence, in order of arrival, without gaps between rows.

    With `pad_kv`, all rows are written at the same slot: the one after the last slot that any row uses.
    """

    def __init__(self, pad_kv: bool) -> None:
        self._pad_kv = pad_kv
        self._slots: dict[str, list[int]] = {}

    @property
    def num_rows(self) -> int:
        return len(self._slots)

    @property
    def num_slots(self) -> int:
        """Slots per row in use: one after the last used slot of any row."""
        return max((slots[-1] + 1 for slots in self._slots.values() if slots), default=0)

    @property
    def num_holes(self) -> int:
        """Slots in use, over all rows, that hold no token."""
        num_slots = self.num_slots
        return sum(num_slots - len(slots) for slots in self._slots.values())

    def rows(self, request_ids: Iterable[str]) -> list[int]:
        """The rows of sequences; a new sequence gets the next row."""
        for request_id in request_ids:
            self._slots.setdefault(request_id, [])
        row_of = {request_id: row for row, request_id in enumerate(self._slots)}
        return [row_of[request_id] for request_id in request_ids]

    def slots(self, request_id: str) -> list[int]:
        return self._slots[request_id]

    def write_start(self, request_id: str) -> int:
        """Slot of the next token: with padded KV after the batch's last slot, else after the row's own last slot."""
        if self._pad_kv:
            return self.num_slots
        slots = self._slots[request_id]
        return slots[-1] + 1 if slots else 0

    def truncate(self, request_id: str, num_tokens: int) -> list[int]:
        """Keep the first `num_tokens` tokens. Returns the slots that were given up."""
        slots = self._slots[request_id]
        dropped = slots[num_tokens:]
        del slots[num_tokens:]
        return dropped

    def release(self, request_ids: Iterable[str]) -> list[int]:
        """Forget sequences. Returns the former rows of those that stay; they close ranks in this order."""
        gone = set(request_ids)
        stay = [row for row, request_id in enumerate(self._slots) if request_id not in gone]
        self._slots = {request_id: slots for request_id, slots in self._slots.items() if request_id not in gone}
        return stay
