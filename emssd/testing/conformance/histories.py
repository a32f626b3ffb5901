"""Histories of a KV cache that are played twice, the second time with something added that must change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from emssd.attention import Kept, KVCacheSpec, PackedInputs
from emssd.attention.trees import path
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from emssd.testing.conformance.machine import WatchedBackend
from emssd.testing.conformance.rules import broken, named
from emssd.testing.machines import check_plan, moved
from emssd.testing.strategies import Waves, trees

__all__ = ["Move", "Play", "Turn", "check_same", "histories", "play"]

_PROMPT, _DRAFT, _TURNS = 20, 5, 6  # the most


@dataclass(frozen=True, slots=True)
class Move:
    """The move of a row in one step.

    Attributes:
        prompt: tokens of its prompt, if it begins here.
        sick: if it begins here, whether its keys and values are no numbers where a play says so.
        tree: the parents of its drafted tokens.
        accepted: the indices of accepted ones, ascending.
        failed: the parents of what is drafted in an attempt at this step that fails, where a play says so.
        leaves: whether it is released after the step.
    """

    row: int
    prompt: int
    sick: bool
    tree: tuple[int, ...]
    accepted: tuple[int, ...]
    failed: tuple[int, ...]
    leaves: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """A step: rows in their order; and after how many layers its failed attempt ends, ``None`` for none."""

    moves: tuple[Move, ...]
    fails_after: int | None


@dataclass(frozen=True, slots=True)
class Play:
    """The moves that are added to a history.

    Attributes:
        bad: keys and values of sick rows, and of all rejected tokens; ``None`` for usual ones.
        fails: whether steps are attempted before, and fail.
        alone: whether each row is fed alone, token by token, without its rejected ones.
    """

    bad: float | None = None
    fails: bool = False
    alone: bool = False


@st.composite
def histories(draw: st.DrawFn, *, with_trees: bool = False) -> list[Turn]:
    """Up to four rows that come, accept each their own number of drafted tokens, and go."""
    shapes = trees if with_trees else _chains
    turns = []
    for _ in range(draw(st.integers(2, _TURNS))):
        rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        moves = []
        for row in rows:
            tree = draw(shapes(draw(st.integers(0, _DRAFT))))
            moves.append(
                Move(
                    row,
                    prompt=draw(st.integers(1, _PROMPT)),
                    sick=draw(st.booleans()),
                    tree=tree,
                    accepted=tuple(path(tree, draw(st.integers(0, len(tree))) - 1)),
                    failed=draw(shapes(draw(st.integers(0, _DRAFT)))),
                    leaves=draw(st.integers(0, 3)) == 0,
                )
            )
        turns.append(Turn(tuple(moves), draw(st.none() | st.integers(0, 3))))
    return turns


def _chains(num_nodes: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.just(tuple(range(-1, num_nodes - 1)))


def play(backend: WatchedBackend, spec: KVCacheSpec, history: list[Turn], added: Play) -> list[list[torch.Tensor]]:
    """Drive an allocated backend through a history.

    Returns:
        For each layer of each step, and each token of a row that is not sick, without its rejected ones: what
        attention gave for it, ``[copies, num_qo_heads, value_dim]``, as a prompt's tokens may have been repeated.
    """
    return list(_Player(backend, spec, added).outputs(history))


class _Player:
    def __init__(self, backend: WatchedBackend, spec: KVCacheSpec, added: Play) -> None:
        self._backend, self._spec, self._added = backend, spec, added
        self._waves = Waves(spec, seed=0)
        self._ids, self._other_ids = itertools.count(), itertools.count(10**6)
        self._rows: dict[int, tuple[Row, bool]] = {}
        self._bad: set[int] = set()

    def outputs(self, history: list[Turn]) -> Iterator[list[torch.Tensor]]:
        for number, turn in enumerate(history):
            for move in turn.moves:
                if move.row not in self._rows:
                    request = Request(f"row-{move.row}-from-{number}", tuple(self._new(move.prompt, move.sick)), 100)
                    self._rows[move.row] = (Row(request), move.sick)
            if self._added.fails and turn.fails_after is not None:
                self._fail(turn)
            drafted = [self._drafted(move) for move in turn.moves]
            rows = [self._rows[move.row][0] for move in turn.moves]
            packed = pack(rows, self._draft([move.tree for move in turn.moves], drafted))
            if self._added.alone:
                yield from self._run_alone(turn, drafted)
            else:
                yield from self._run(packed, self._judged(turn, packed), len(self._spec.layers))
            sources = tuple(moved(len(row.tokens), move.accepted) for move, row in zip(turn.moves, rows, strict=True))
            for move, row, ids in zip(turn.moves, rows, drafted, strict=True):
                tokens = [*(ids[node] for node in move.accepted), *self._new(1, self._rows[move.row][1])]
                row.advance(tokens, None, num_drafted=len(ids), num_accepted=len(move.accepted))
            kv_lens = tuple(row.num_cached for row in rows)
            moves = any(sources) and not self._added.alone
            self._backend.commit(Kept(packed.request_ids, kv_lens, sources if moves else ()))
            for move, row in zip(turn.moves, rows, strict=True):
                if move.leaves:
                    self._backend.release([row.request_id])
                    del self._rows[move.row]

    def _fail(self, turn: Turn) -> None:
        assert turn.fails_after is not None
        shapes = [move.failed for move in turn.moves]
        draft = self._draft(shapes, [[next(self._other_ids) for _ in tree] for tree in shapes])
        packed = pack([self._rows[move.row][0] for move in turn.moves], draft)
        for _ in self._run(packed, [], min(turn.fails_after, len(self._spec.layers))):
            pass

    def _drafted(self, move: Move) -> list[int]:
        """The ids of what a row drafts; its rejected tokens are bad where a play says so."""
        sick = self._rows[move.row][1]
        return [self._new(1, sick or node not in move.accepted)[0] for node in range(len(move.tree))]

    def _draft(self, shapes: list[tuple[int, ...]], ids: list[list[int]]) -> Draft:
        if not self._spec.trees:
            return Draft.from_chains(ids)
        return Draft.from_trees(list(zip(tokens, tree, strict=True)) for tokens, tree in zip(ids, shapes, strict=True))

    def _run(self, packed: PackedInputs, judged: list[int], num_layers: int) -> Iterator[list[torch.Tensor]]:
        if self._added.fails:  # or else this would be "no legal call raises"
            with named("backend.retry", "plan, where a step before may have failed,"):
                plan = self._backend.backend.plan(packed)
        else:
            plan = self._backend.plan(packed)
        places = check_plan(plan, packed)
        ids = plan.input_ids.flatten()
        bad = torch.tensor([token in self._bad for token in ids.tolist()], device=ids.device)
        for layer in range(num_layers):
            qkv = self._waves.qkv(ids, layer)
            if self._added.bad is None:
                out = self._backend.forward(plan, layer, *qkv)
            else:
                for tensor in qkv:
                    tensor[bad] = self._added.bad
                with named("backend.raises", f"forward of layer {layer}"):
                    out = self._backend.backend.forward(plan, layer, *qkv)
            yield [out[places[token]].clone() for token in judged]

    def _run_alone(self, turn: Turn, drafted: list[list[int]]) -> Iterator[list[torch.Tensor]]:
        layers: list[list[torch.Tensor]] = [[] for _ in self._spec.layers]
        for move, ids in zip(turn.moves, drafted, strict=True):
            row, sick = self._rows[move.row]
            new = [*row.tokens[row.num_cached :], *(ids[node] for node in move.accepted)]
            for length, token in enumerate(new, start=row.num_cached + 1):
                packed = pack_nodes((row.request_id,), torch.tensor([token]), [1], [length])
                for out, (found,) in zip(layers, self._run(packed, [0], len(layers)), strict=True):
                    out += [] if sick else [found]
                self._backend.commit(Kept(packed.request_ids, packed.kv_lens))
        yield from layers

    def _judged(self, turn: Turn, packed: PackedInputs) -> list[int]:
        """The tokens of a step that see no bad one."""
        judged: list[int] = []
        for move, start, stop in zip(turn.moves, packed.qo_indptr, packed.qo_indptr[1:], strict=False):
            if not self._rows[move.row][1]:
                origin = stop - len(move.tree)
                judged.extend([*range(start, origin), *(origin + node for node in move.accepted)])
        return judged

    def _new(self, count: int, bad: bool) -> list[int]:
        ids = [next(self._ids) for _ in range(count)]
        if bad:
            self._bad.update(ids)
        return ids


def check_same(rule: str, usual: list[list[torch.Tensor]], with_more: list[list[torch.Tensor]], atol: float) -> None:
    """Hold every token's result to that of the other play. Raises BrokenRule: `rule`."""
    for expected, got in zip(usual, with_more, strict=True):
        for right, candidates in zip(expected, got, strict=True):
            errors = (candidates.unsqueeze(1) - right.unsqueeze(0)).abs().flatten(2).amax(dim=2)
            if not float(errors.nan_to_num(torch.inf).min()) <= atol:
                broken(rule, f"a result is {_short(candidates)} in the place of {_short(right)}")


def _short(result: torch.Tensor) -> str:
    values = result[0].flatten()[:4].tolist()
    return f"[{', '.join(f'{value:.4g}' for value in values)}, …]"
