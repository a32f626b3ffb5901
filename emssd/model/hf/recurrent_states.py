"""`StateCache`: the states of layers that mix tokens by a recurrence, beside the KV cache.

A state cannot be cut back, so it moves only when tokens are committed. A row has a state after some of its tokens, and
keeps the inputs of the later ones, a few numbers a token and layer. A step starts from the state, applies these inputs,
and goes on with its tokens along each path of a tree. It also stores the state after the last token that is no draft;
`commit` adopts that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from emssd.attention import Kept, PackedInputs
from emssd.model.hf.recurrent_layers import states_by
from emssd.model.hf.recurrent_pass import Path, Paths, StatePass

__all__ = ["RowTokens", "StateCache"]


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of one row in a step.

    Attributes:
        places: ``[n]`` for each new token, its index among all that the model is fed.
        kv_len: tokens of the row, with the new ones.
        num_drafts: how many of the new ones are drafted; they are the last.
        tree: parents of the row's last tokens, see `emssd.attention.trees`; empty for a chain.
    """

    places: tuple[int, ...]
    kv_len: int
    num_drafts: int
    tree: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """The index of the first new token."""
        return self.kv_len - len(self.places)

    def parent(self, index: int) -> int:
        """The index of the token before; -1 before the first."""
        node = index - (self.kv_len - len(self.tree))
        if node < 0:
            return index - 1
        return self.kv_len - len(self.tree) + self.tree[node]


@dataclass(frozen=True, slots=True)
class _Row:
    """The states of a row between two steps.

    Attributes:
        at: tokens that its state has read.
        ahead: tokens that its other state has read, none of them drafted; 0 if there is none.
        first: index of the first token whose inputs are kept.
        kept: for each token from there on, the index of its inputs among those of the latest step.
        flipped: which of its two slots has the state.
    """

    at: int = 0
    ahead: int = 0
    first: int = 0
    kept: tuple[int, ...] = ()
    flipped: bool = False

    def committed(self, kv_len: int, moved: tuple[int, ...], history: int) -> _Row:
        """The row after a commit that keeps `kv_len` tokens, the last of them taken from `moved`."""
        num_fixed = kv_len - len(moved)
        kept = (*self.kept[: num_fixed - self.first], *(self.kept[index - self.first] for index in moved))
        row = replace(self, kept=kept, ahead=0)
        if 0 < self.ahead <= num_fixed:
            row = replace(row, at=self.ahead, flipped=not self.flipped)
        drop = max(row.at - history - row.first, 0)
        return replace(row, first=row.first + drop, kept=row.kept[drop:])


class StateCache:
    """The states of all rows of one model, of use in a pass within `step`. It grows beyond `max_rows`."""

    def __init__(self, max_rows: int = 8) -> None:
        self._max_rows = max_rows
        self._rows: dict[str, _Row] = {}
        self._slots: dict[str, int] = {}  # by row, i of its slots 2 i and 2 i + 1
        self._free: list[int] = []
        self._inputs: list[torch.Tensor] = []  # [tokens, numbers] of each layer, in the order of calls
        self._states: dict[int, torch.Tensor] = {}  # [slots, heads, k, v] of each layer that has one
        self._history = 0  # tokens that convolutions see before the newest

    @property
    def bytes_per_row(self) -> int:
        """Bytes of the states of one row; known after the first pass."""
        return sum(2 * state[0].numel() * state.itemsize for state in self._states.values())

    @property
    def used_bytes(self) -> int:
        return self.bytes_per_row * len(self._slots)

    @contextmanager
    def step(self, packed: PackedInputs, token_index: torch.Tensor | None = None) -> Iterator[None]:
        """Within, the model is run on a step; `token_index` is that of its `StepPlan`."""
        places = range(packed.num_tokens) if token_index is None else token_index.tolist()
        logits = torch.searchsorted(packed.logit_rows, torch.tensor(packed.qo_indptr)).tolist()
        feeds = {}
        for row, name in enumerate(packed.request_ids):
            begin, end = packed.qo_indptr[row : row + 2]
            num_logits, tree = logits[row + 1] - logits[row], packed.trees[row] if packed.trees else ()
            num_drafts = min(len(tree), end - begin) or max(num_logits - 1, 0)
            feeds[name] = RowTokens(tuple(places[begin:end]), packed.kv_lens[row], num_drafts, tree)
        with self.pass_of(feeds):
            yield

    @contextmanager
    def pass_of(self, feeds: dict[str, RowTokens]) -> Iterator[None]:
        """Within, the model is run on these tokens of rows; nothing changes if that fails."""
        paths, rows = self._plan(feeds)
        num_slots = 2 * max(self._max_rows, 1 + max(self._slots.values(), default=0))
        ops = StatePass(paths, self._inputs, self._states, self._history, num_slots)
        with states_by(ops):
            yield
        ops.carry_the_rest()
        self._rows, self._inputs, self._states, self._history = rows, ops.inputs, ops.states, ops.history

    def commit(self, kept: Kept) -> None:
        """Keep these tokens, and move accepted ones to their new places; see `emssd.attention.Kept`."""
        sources = kept.sources or ((),) * len(kept.request_ids)
        for name, kv_len, moved in zip(kept.request_ids, kept.kv_lens, sources, strict=True):
            if (row := self._rows.get(name)) is not None:
                self._rows[name] = row.committed(kv_len, moved, self._history)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget rows. Unknown ids are no error."""
        for name in request_ids:
            self._rows.pop(name, None)
            if (slot := self._slots.pop(name, None)) is not None:
                self._free.append(slot)

    def _plan(self, feeds: dict[str, RowTokens]) -> tuple[Paths, dict[str, _Row]]:
        """The paths of a pass, and all rows as they are after it."""
        step, rows = Paths(), dict(self._rows)
        for name, feed in feeds.items():
            row = rows.get(name, _Row())
            assert row.at <= feed.start, "a state is not cut back"
            ahead = row.ahead if row.ahead <= feed.start else 0
            rows[name] = replace(row, ahead=ahead, kept=row.kept[: feed.start - row.first])
        for name, row in rows.items():
            before = len(step.carried)
            step.carried += row.kept
            rows[name] = replace(row, kept=tuple(range(before, len(step.carried))))
        num_inputs = len(step.carried)
        step.parents = [-1] * num_inputs
        for row in rows.values():
            if row.kept:
                step.parents[row.kept[0] + 1 : row.kept[-1] + 1] = row.kept[:-1]
        for name, feed in feeds.items():
            new = range(num_inputs, num_inputs := num_inputs + len(feed.places))
            step.places += feed.places
            rows[name] = self._plan_row(step, name, replace(rows[name], kept=(*rows[name].kept, *new)), feed)
        return step, rows

    def _plan_row(self, step: Paths, name: str, row: _Row, feed: RowTokens) -> _Row:
        parents = {index: feed.parent(index) for index in range(row.first, feed.kv_len)}
        for index in range(max(row.first, feed.kv_len - len(feed.tree)), feed.start):  # nodes of steps before
            step.parents[row.kept[index - row.first]] = row.kept[parents[index] - row.first]
        for index in range(feed.start, feed.kv_len):
            parent = parents[index]
            step.parents.append(row.kept[parent - row.first] if parent >= row.first else -1)
        if name not in self._slots:
            self._slots[name] = self._free.pop() if self._free else len(self._slots)
        slot = 2 * self._slots[name]
        base, from_slot = (row.ahead, not row.flipped) if row.ahead else (row.at, row.flipped)
        save = 0
        if not row.ahead and feed.num_drafts < len(feed.places):
            save = feed.kv_len - feed.num_drafts
        done: set[int] = set()
        inner, branches, before = set(parents.values()), list[list[int]](), list[int]()
        for leaf in range(feed.start, feed.kv_len):
            if leaf in inner:
                continue
            indices = [leaf]
            while (parent := parents[indices[-1]]) >= base:
                indices.append(parent)
            branches.append(indices[::-1])
        for indices in sorted(branches):
            outputs = [feed.places[i - feed.start] if i >= feed.start and i not in done else -1 for i in indices]
            path = Path(slot + from_slot if base else -1, [row.kept[i - row.first] for i in indices], outputs)
            if save and not done:
                path.save, path.save_slot = save - base, slot + (not row.flipped)
            path.shared = sum(one == other for one, other in zip(before, indices, strict=False))
            done.update(indices)
            before = indices
            step.paths.append(path)
        return replace(row, ahead=save) if save else row
