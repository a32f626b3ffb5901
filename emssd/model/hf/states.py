"""`StateCache`: the states of layers that mix tokens by a recurrence, beside the KV cache.

A state cannot be cut back, so it moves only when tokens are committed. A row has a state after some of its tokens, and
keeps the inputs of the later ones, a few numbers a token and layer. A step starts from the state, applies these inputs,
and goes on with its own tokens along each path of a tree. It also stores the state after the last token that is no
draft, which `commit` adopts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import cast

import torch

from emssd.attention import Kept, PackedInputs
from emssd.model.hf.mixing import Convolution, Recurrence, mixed_by
from emssd.native import load_kernels, why_unavailable

__all__ = ["Feed", "StateCache"]


@dataclass(frozen=True, slots=True)
class Feed:
    """The tokens of one row in a step.

    Attributes:
        places: ``[n]`` of each new token its place among all that the model is fed.
        kv_len: tokens of the row, the new ones included.
        num_drafts: how many of the new ones, the last, are drafted.
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
        at: its state is that after so many tokens.
        ahead: its other state is that after so many; 0 for none. None of them is drafted.
        first: the index of the first token whose inputs are kept.
        kept: of each token from there on, the place of its inputs among those of the latest step.
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


@dataclass(slots=True)
class _Path:
    """Tokens of one row from a state to the end of a branch.

    Attributes:
        slot: the state that it starts from; -1 for zeros.
        inputs: of each token the place of its inputs in this step.
        outputs: of each token its place among the fed ones; -1 if another path computes it, or an earlier step did.
        save: after so many tokens the state goes to `save_slot`; 0 for never.
        shared: so many of its tokens are the first ones of the path before, whose row it shares.
    """

    slot: int
    inputs: list[int]
    outputs: list[int]
    save: int = 0
    save_slot: int = -1
    shared: int = 0


@dataclass(slots=True)
class _Step:
    """The decisions of `StateCache.plan`.

    Attributes:
        carried: places of kept inputs among those of the latest step; they come first in this one.
        places: of each new token, in the order of their inputs, its place among the fed ones.
        paths: row by row, branches of a tree in the order of a walk through it.
        rows: all rows as they are after the pass.
        parents: of each of this step's inputs that of the token before; -1 before the first.
    """

    carried: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    paths: list[_Path] = field(default_factory=list)
    rows: dict[str, _Row] = field(default_factory=dict)
    parents: list[int] = field(default_factory=list)
    _tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of all paths, ``[2, length]`` inputs and outputs, and ``[paths, 6]`` the paths, for the kernel."""
        if self._tables is None:
            ends = [*accumulate(len(path.inputs) for path in self.paths)]
            tokens = [[each for path in self.paths for each in path.inputs]]
            tokens.append([each for path in self.paths for each in path.outputs])
            paths = [
                [path.slot, end - len(path.inputs), end, path.save, path.save_slot, path.shared]
                for path, end in zip(self.paths, ends, strict=True)
            ]
            self._tables = torch.tensor(tokens), torch.tensor(paths)
        return self._tables


class StateCache:
    """The states of all rows of one model, of use in a pass within `step`.

    Args:
        max_rows: so many rows have room; more make it grow.
    """

    def __init__(self, max_rows: int = 8) -> None:
        self._max_rows = max_rows
        self._rows: dict[str, _Row] = {}
        self._slots: dict[str, int] = {}  # of a row: it has the slots 2 i and 2 i + 1
        self._free: list[int] = []
        self._inputs: list[torch.Tensor] = []  # [tokens, numbers] of each layer, in the order of calls
        self._states: dict[int, torch.Tensor] = {}  # [slots, heads, k, v] of each layer that has one
        self._history = 0  # tokens that convolutions see before the newest

    @property
    def bytes_per_row(self) -> int:
        """Bytes of the states of one row; known after the first pass."""
        return sum(2 * state[0].numel() * state.itemsize for state in self._states.values())

    @property
    def held(self) -> int:
        """Bytes of the states of all rows."""
        return self.bytes_per_row * len(self._slots)

    @contextmanager
    def step(self, packed: PackedInputs, token_index: torch.Tensor | None = None) -> Iterator[None]:
        """For the pass of a step; `token_index` is that of its `StepPlan`."""
        places = range(packed.num_tokens) if token_index is None else token_index.tolist()
        logits = torch.searchsorted(packed.logit_rows, torch.tensor(packed.qo_indptr)).tolist()
        feeds = {}
        for row, name in enumerate(packed.request_ids):
            begin, end = packed.qo_indptr[row : row + 2]
            num_logits, tree = logits[row + 1] - logits[row], packed.trees[row] if packed.trees else ()
            num_drafts = min(len(tree), end - begin) or max(num_logits - 1, 0)
            feeds[name] = Feed(tuple(places[begin:end]), packed.kv_lens[row], num_drafts, tree)
        with self.pass_of(feeds):
            yield

    @contextmanager
    def pass_of(self, feeds: dict[str, Feed]) -> Iterator[None]:
        """For a pass that is fed these tokens of rows; nothing changes if it fails."""
        step = self._plan(feeds)
        mixer = _Mixer(self, step)
        with mixed_by(mixer):
            yield
        mixer.carry_the_rest()
        self._rows, self._inputs, self._states, self._history = step.rows, mixer.inputs, mixer.states, mixer.history

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

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            self._slots[name] = self._free.pop() if self._free else len(self._slots)
        return self._slots[name]

    def _plan(self, feeds: dict[str, Feed]) -> _Step:
        step, known = _Step(), dict(self._rows)
        for name, feed in feeds.items():
            row = known.get(name, _Row())
            assert row.at <= feed.start, "a state is not cut back"
            ahead = row.ahead if row.ahead <= feed.start else 0
            known[name] = replace(row, ahead=ahead, kept=row.kept[: feed.start - row.first])
        for name, row in known.items():
            before = len(step.carried)
            step.carried += row.kept
            known[name] = replace(row, kept=tuple(range(before, len(step.carried))))
        num_inputs = len(step.carried)
        step.parents = [-1] * num_inputs
        for row in known.values():
            if row.kept:
                step.parents[row.kept[0] + 1 : row.kept[-1] + 1] = row.kept[:-1]
        for name, feed in feeds.items():
            new = range(num_inputs, num_inputs := num_inputs + len(feed.places))
            step.places += feed.places
            known[name] = self._plan_row(step, name, replace(known[name], kept=(*known[name].kept, *new)), feed)
        step.rows = known
        return step

    def _plan_row(self, step: _Step, name: str, row: _Row, feed: Feed) -> _Row:
        parents = {index: feed.parent(index) for index in range(row.first, feed.kv_len)}
        for index in range(max(row.first, feed.kv_len - len(feed.tree)), feed.start):  # nodes of steps before
            step.parents[row.kept[index - row.first]] = row.kept[parents[index] - row.first]
        for index in range(feed.start, feed.kv_len):
            parent = parents[index]
            step.parents.append(row.kept[parent - row.first] if parent >= row.first else -1)
        slot = 2 * self._slot(name)
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
            path = _Path(slot + from_slot if base else -1, [row.kept[i - row.first] for i in indices], outputs)
            if save and not done:
                path.save, path.save_slot = save - base, slot + (not row.flipped)
            path.shared = sum(one == other for one, other in zip(before, indices, strict=False))
            done.update(indices)
            before = indices
            step.paths.append(path)
        return replace(row, ahead=save) if save else row


class _Mixer:
    """Mixes the tokens of one pass: computes what the functions of `emssd.model.hf.mixing.install` are called for."""

    def __init__(self, cache: StateCache, step: _Step) -> None:
        self._cache, self._step = cache, step
        self.inputs: list[torch.Tensor] = []
        self.states = dict(cache._states)
        self.history = cache._history
        self._indices: dict[str | int, torch.Tensor] = {}  # by name, or by the size of a convolution

    def convolve(self, inputs: Convolution) -> torch.Tensor:
        """``[n, channels]`` in the dtype of the weight."""
        size = inputs.weight.shape[-1]
        self.history = max(self.history, size - 1)
        values = self._with_carried(inputs.values)
        wide = torch.promote_types(inputs.weight.dtype, torch.float32)
        padded = torch.cat([values, values.new_zeros(1, values.shape[1])]).to(wide)
        windows = self._index(size, values.device)
        weight = inputs.weight.to(wide)
        out = torch.zeros_like(inputs.values, dtype=wide)
        mixed = padded[windows[:, 0]] * weight[:, 0]
        for place in range(1, size):
            mixed = mixed + padded[windows[:, place]] * weight[:, place]
        if inputs.bias is not None:
            mixed = mixed + inputs.bias.to(wide)
        out[self._index("places", out.device)] = mixed
        return out.to(inputs.weight.dtype)

    def recur(self, inputs: Recurrence) -> torch.Tensor:
        """``[n, heads, v]``."""
        query, key, value, decay, beta, rates = inputs
        parts = [key, value, decay, *([] if beta is None else [beta])]
        shapes, (heads, num_keys, num_values) = [part.shape[1:] for part in parts], (*key.shape[1:], value.shape[-1])
        layer = len(self.inputs)
        kept = self._with_carried(torch.cat([part.flatten(1) for part in parts], 1))
        sizes = [shape.numel() for shape in shapes]
        if layer not in self.states:
            self.states[layer] = kept.new_zeros(0, heads, num_keys, num_values)
        slots = self._room_for(layer)
        if slots.device.type == "cpu" and why_unavailable() is None:
            tables, rates = self._step.tables(), rates if rates is None else rates.contiguous()
            return cast(
                "torch.Tensor", load_kernels().recur(kept, query.contiguous(), slots, rates, *tables, *decay.shape[2:])
            )
        paths = sorted(self._step.paths, key=lambda path: -len(path.inputs))
        starts = torch.tensor([path.slot for path in paths], device=kept.device)
        state = slots[starts.clamp_min(0)].masked_fill((starts < 0)[:, None, None, None], 0)
        out = torch.zeros_like(value)
        for at in range(len(paths[0].inputs)):
            active = [path for path in paths if at < len(path.inputs)]
            places = torch.tensor([path.inputs[at] for path in active], device=kept.device)
            split = torch.split(kept[places], sizes, 1)
            key, value, decay, *rest = (part.view(-1, *shape) for part, shape in zip(split, shapes, strict=True))
            now = state[: len(active)]
            now = now * (decay if rates is None else decay * rates).exp()
            if rest:
                value = (value - (now * key[..., None]).sum(2)) * rest[0][..., None]
            now = now + key[..., None] * value[:, :, None]
            state[: len(active)] = now
            wanted = [(row, path.outputs[at]) for row, path in enumerate(active) if path.outputs[at] >= 0]
            if wanted:
                rows, outputs = torch.tensor(wanted, device=kept.device).unbind(1)
                out[outputs] = (now[rows] * query[outputs][..., None]).sum(2)
            for row, path in enumerate(active):
                if path.save == at + 1:
                    slots[path.save_slot] = now[row]
        return out

    def carry_the_rest(self) -> None:
        """Keep what layers that a draft leaves out carry; the target drops what stands for the draft's tokens."""
        num_new = len(self._step.places)
        for old in self._cache._inputs[len(self.inputs) :]:
            carried = old[self._index("carried", old.device)] if self._step.carried else old[:0]
            self.inputs.append(torch.cat([carried, old.new_zeros(num_new, old.shape[1])]))

    def _with_carried(self, values: torch.Tensor) -> torch.Tensor:
        """The inputs of this layer for all tokens of the step, the carried ones first."""
        layer, new = len(self.inputs), values[self._index("places", values.device)]
        if self._step.carried:
            carried = self._index("carried", values.device)
            new = torch.cat([self._cache._inputs[layer][carried], new])
        self.inputs.append(new)
        return new

    def _room_for(self, layer: int) -> torch.Tensor:
        state, num_slots = self.states[layer], 2 * max(self._cache._max_rows, 1 + max(self._cache._slots.values()))
        if len(state) < num_slots:
            state = torch.cat([state, state.new_zeros(num_slots - len(state), *state.shape[1:])])
            self.states[layer] = state
        return state

    def _index(self, key: str | int, device: torch.device) -> torch.Tensor:
        """Places of the step, or the windows of a convolution of a size: made once for all layers of a device."""
        if (known := self._indices.get(key)) is None or known.device != device:
            made = self._windows(key) if isinstance(key, int) else torch.tensor(getattr(self._step, key))
            known = self._indices[key] = made.to(device)
        return known

    def _windows(self, size: int) -> torch.Tensor:
        """``[nnz, size]`` of each new token the places of its ancestors' inputs and its own; -1 before the first."""
        step = self._step
        own = torch.tensor([*range(len(step.carried), len(step.parents))])
        parents, windows = torch.tensor([*step.parents, -1]), [own]
        for _ in range(size - 1):
            windows.append(parents[windows[-1]])
        return torch.stack(windows[::-1], 1)
