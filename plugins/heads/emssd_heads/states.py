"""`StatesDrafter`: drafts from the target's hidden states; `KnownStates`, those of one row."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from emssd.draft_models.draft_cache import DraftCache
from emssd.draft_models.growing_tree import GrowingTree
from emssd.draft_models.level_drafter import GrowingRow, LevelDrafter
from emssd.draft_models.shapes import Shape
from emssd.drafting import Draft, HiddenStates, Outcome
from emssd.model import BorrowedTarget
from emssd.sequences import Batch, Row

__all__ = ["KnownStates", "StatesDrafter"]

_MOST_ARRIVED, _MOST_WAITING = 1024, 256  # tokens of all rows, and of one


@dataclass(slots=True)
class KnownStates:
    """The target's hidden states of one row, as they come; those that were used are dropped, but for the last.

    Attributes:
        num_used: the states of so many tokens were used.
        start: position of the first state that is kept.
        pieces: states ``[n, …]`` from there on, as they came.
    """

    num_used: int = 0
    start: int = 0
    pieces: list[torch.Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position after the last state."""
        return self.start + sum(map(len, self.pieces))

    def add(self, start: int, states: torch.Tensor) -> None:
        """Take in the states ``[n, …]`` of tokens from position `start` on."""
        assert start == self.stop, f"hidden states from position {start} on, and those before end at {self.stop}"
        self.pieces.append(states)

    def covers(self, num_tokens: int) -> bool:
        """Whether the states of a row's first `num_tokens` tokens are known, and the last of them is kept."""
        return self.start < num_tokens <= self.stop

    def new(self, num_tokens: int) -> torch.Tensor:
        """The states ``[n, …]`` of the first `num_tokens` tokens that were not used yet.

        The last of them is among these also where it was used, as after a step that failed.
        """
        self.pieces = [torch.cat(self.pieces)] if len(self.pieces) > 1 else self.pieces
        return self.pieces[0][min(self.num_used, num_tokens - 1) - self.start : num_tokens - self.start]

    def used(self, num_tokens: int) -> None:
        """Drop the states of the first `num_tokens` tokens, which were used, but for the last."""
        while self.start + len(self.pieces[0]) < num_tokens:
            self.start += len(self.pieces.pop(0))
        self.pieces[0] = self.pieces[0][num_tokens - 1 - self.start :].clone()
        self.start, self.num_used = num_tokens - 1, num_tokens


class StatesDrafter(LevelDrafter):
    """Drafts from the target's hidden states, or features that are made of them.

    A row is drafted for once the target has computed all of its tokens but the newest, so not in its first step.

    Args:
        shape: of the trees; one child for each node makes chains.
        layers: the hidden states that are read, in this order, see `emssd.drafting.Drafter.hidden_layers`.
        target: whose embeddings and vocabulary projection may be used.
        cache: the KV of what drafts; ``None`` without a KV cache.
        max_len: tokens of the longest row that it holds.
    """

    reads_all = True
    """Whether the states of all tokens are read, or those of the last one before the newest."""

    def __init__(
        self,
        shape: Shape,
        layers: Seq[int],
        target: BorrowedTarget,
        cache: DraftCache | None = None,
        max_len: int = sys.maxsize,
    ) -> None:
        super().__init__(shape, target.vocab_size, cache)
        self.hidden_layers, self._target, self._max_len = tuple(layers), target, max_len
        self._states: dict[str, KnownStates] = {}
        # As long as nothing is drafted, hidden states are laid aside: first as they come, then, row by row, with the
        # position of the first. Features of many at once cost less, and none those of rows that are never drafted for.
        self._arrived: list[HiddenStates] = []
        self._num_arrived = 0  # tokens
        self._waiting: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if not any(budget):
            return Draft.empty(len(batch))
        self._sort_arrived()
        self._make_features([row.request_id for row, limit in zip(batch, budget, strict=True) if limit])
        return super().propose(batch, budget)

    def observe(self, outcome: Outcome) -> None:
        """Keep the hidden states of all tokens that the target has computed."""
        if (hidden := outcome.hidden) is None:
            return
        self._arrived.append(hidden)
        self._num_arrived += hidden.indptr[-1]
        if self._num_arrived > _MOST_ARRIVED:
            self._sort_arrived()
            waiting = {name: sum(len(own) for _, own in pieces) for name, pieces in self._waiting.items()}
            self._make_features([name for name, number in waiting.items() if number > _MOST_WAITING])

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._sort_arrived()  # later rows may have the same ids
        if self._cache is not None:
            self._cache.release(request_ids)
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._waiting.pop(request_id, None)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features of tokens, ``[n, …]``, from their hidden states ``[n, states * hidden_size]`` side by side."""
        return hidden

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        num_known, states = len(row.tokens) - 1, self._states.get(row.request_id)
        reach = self._max_len - num_known
        if states is None or not states.covers(num_known) or reach < 0:
            return None
        return GrowingTree(num_known, num_nodes, depth, min(self.most_cached(num_nodes, depth), reach))

    def most_cached(self, num_nodes: int, depth: int) -> int:
        """The most tokens whose KV a tree needs, beside that of its row."""
        return self.shape.most_cached(num_nodes, depth) if self.caches_nodes else 0

    def _sort_arrived(self) -> None:
        for hidden in self._arrived:
            joined = torch.cat(hidden.states, dim=-1)
            for name, start, (own,) in replace(hidden, layers=(0,), states=(joined,)).rows():
                self._waiting.setdefault(name, []).append((start, own))
        self._arrived, self._num_arrived = [], 0

    def _make_features(self, request_ids: Iterable[str]) -> None:
        waiting = [(name, *piece) for name in request_ids for piece in self._waiting.pop(name, ())]
        if not waiting:
            return
        features = self.features(torch.cat([own for *_, own in waiting]))
        pieces = torch.split(features, [len(own) for *_, own in waiting])
        for (name, start, _), own in zip(waiting, pieces, strict=True):
            known = self._states.setdefault(name, KnownStates())
            known.add(start, own)
            if not self.reads_all:
                known.used(known.stop)

    def _have_used(self, rows: Seq[GrowingRow]) -> None:
        for row in rows:
            self._states[row.request_id].used(row.tree.num_tokens)
            if self._cache is not None:
                self._cache.held[row.request_id] = row.tree.num_tokens
