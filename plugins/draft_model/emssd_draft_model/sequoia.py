"""The static tree that is best for an acceptance known by depth and rank (Chen et al. 2024, Sequoia, arXiv 2402.12374).

The paper assumes that acceptance depends on a child's rank alone ("positional acceptance", §3.1); here it may depend
on the depth too. A tree's expected number of accepted tokens is the sum over its nodes of what a node is worth: the
product of acceptances along its way. The paper finds the best tree of each size by a dynamic programme. As nobody is
worth more than its parent, the `n` nodes that are worth most are such a tree, and a heap finds them one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from pathlib import Path

from emssd.draft_models import Expansion, GrowingTree, Shape
from emssd.errors import ConfigError

__all__ = ["SequoiaShape", "read_acceptance"]

Table = Seq[Seq[float]]
"""The probability that the target chooses a child, by depth and rank; levels below the last are like the last."""

_PRIOR, _PRIOR_TRIALS = [0.6, 0.3], 8.0  # of the first child, and each further one as a share of the one before
_TRIALS_BEFORE_REPLAN = 32


def best_tree(acceptance: Table, num_nodes: int, depth: int) -> Iterator[tuple[int, ...]]:
    """The nodes of the best tree of `num_nodes` nodes and `depth` levels, by their paths, parents first.

    Nodes that are worth most come first, so that the first nodes are the best tree of their number. A path names the
    rank of each node on it. Nodes that are worth nothing are left out. Of equal ones the shallower comes first.
    """
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    for _ in range(num_nodes + 1):
        if not heap:
            return
        worth, length, path = heappop(heap)
        if path:
            yield path
        if length < depth:
            for rank, probability in enumerate(acceptance[min(length, len(acceptance) - 1)]):
                if worth * probability < 0:
                    heappush(heap, (worth * probability, length + 1, (*path, rank)))


class MeasuredAcceptance:
    """Counts which of the draft model's most probable tokens the target chose, by depth.

    A depth that has been seen rarely is taken to be like all depths together, and these like a guess.
    """

    def __init__(self, depth: int, width: int) -> None:
        self._hits = [[0] * width for _ in range(depth)]
        self._trials = [0] * depth

    @property
    def num_trials(self) -> int:
        """Choices that were counted."""
        return sum(self._trials)

    def count(self, ranks: Seq[int | None]) -> None:
        """Count the ranks of the target's choices along the way of one row, see `Shape.learn`."""
        for depth, rank in enumerate(ranks[: len(self._trials)]):
            self._trials[depth] += 1
            if rank is not None:
                self._hits[depth][rank] += 1

    def table(self) -> list[list[float]]:
        """``[depth, width]`` probabilities."""
        first, ratio = _PRIOR
        guess = [first * ratio**rank for rank in range(len(self._hits[0]))]
        everywhere = _smoothed([sum(column) for column in zip(*self._hits, strict=True)], self.num_trials, guess)
        return [_smoothed(hits, trials, everywhere) for hits, trials in zip(self._hits, self._trials, strict=True)]


class SequoiaShape(Shape):
    """The best static tree, the same for all rows but for their limits. It is planned again as more is measured.

    With an `acceptance` to plan for, nothing is measured. `width` is the most children of a node.
    """

    def __init__(self, num_nodes: int, depth: int, width: int, acceptance: Table | None = None) -> None:
        self.num_nodes, self.depth, self.width = num_nodes, depth, width
        self._given = None if acceptance is None else [level[:width] for level in acceptance]
        self.reset()

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        children = self._children(tree.num_nodes, tree.depth)
        return [(node, ranks) for node in frontier if (ranks := children.get(tree.path_ranks(node)))]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return max(0, len(self._children(num_nodes, depth)) - 1)

    def learn(self, ranks: Seq[int | None]) -> None:
        self._measured.count(ranks)

    def replan(self) -> None:
        """Plan again when a quarter more has been measured, so that planning takes ever less of the time."""
        if self._given is None and self._measured.num_trials >= self._next_plan:
            self._plan()

    def reset(self) -> None:
        self._measured = MeasuredAcceptance(self.depth, self.width)
        self._plan()

    def _plan(self) -> None:
        self._table: Table = self._given or self._measured.table()
        self._plans: dict[tuple[int, int], dict[tuple[int, ...], list[int]]] = {}
        self._next_plan = max(_TRIALS_BEFORE_REPLAN, self._measured.num_trials * 5 // 4)

    def _children(self, num_nodes: int, depth: int) -> Mapping[tuple[int, ...], Seq[int]]:
        plan = self._plans.get((num_nodes, depth))
        if plan is None:
            plan = self._plans[num_nodes, depth] = {}
            for path in best_tree(self._table, num_nodes, depth):
                plan.setdefault(path[:-1], []).append(path[-1])
        return plan


def read_acceptance(path: str) -> list[list[float]]:
    """The table in a JSON file. Raises ConfigError: it cannot be read, or is no table of probabilities."""
    wanted = "give a list of the levels, each a list of probabilities by rank that add up to at most 1"
    try:
        levels = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafter.acceptance={path} cannot be read: {error}") from error
    if not isinstance(levels, list) or not levels or not all(isinstance(level, list) and level for level in levels):
        raise ConfigError(f"drafter.acceptance={path} is not a list of lists; {wanted}")
    for depth, level in enumerate(levels, start=1):
        if not all(isinstance(p, int | float) and not isinstance(p, bool) and 0 <= p <= 1 for p in level):
            raise ConfigError(f"drafter.acceptance={path} has at level {depth} the values {level}; {wanted}")
        if math.fsum(level) > 1 + 1e-6:
            raise ConfigError(f"drafter.acceptance={path} adds up to {math.fsum(level):g} at level {depth}; {wanted}")
    return [[*map(float, level)] for level in levels]


def _smoothed(hits: Seq[int], trials: int, guess: Seq[float]) -> list[float]:
    return [(hit + _PRIOR_TRIALS * p) / (trials + _PRIOR_TRIALS) for hit, p in zip(hits, guess, strict=True)]
