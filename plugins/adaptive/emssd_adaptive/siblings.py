"""The chance of a child to be the right one, by its depth and its rank, and the worth of a tree's nodes.

Siblings exclude each other. So what is learnt is the chance of a child *given that none of its earlier siblings is
right*; the chances of all children of a node then never add up to more than 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

__all__ = ["Siblings", "levels"]

_MOST_RANKS = 8  # later ones are taken for the last of these
_FADE = 0.99  # a step: what was learnt of ranks that are no longer verified grows old, and they are tried again
_PRIOR_WEIGHT = 3.0  # trials that the first guess counts for
_FIRST_GUESS = 0.25


def levels(tree: Seq[int], accepted: Seq[int]) -> Iterator[tuple[list[int], int]]:
    """The levels of a verified tree at which the target chose: the children that it had there, and the one it took.

    Args:
        tree: the parents of the nodes.
        accepted: the accepted nodes, in order.

    Yields:
        Nodes in order, never none, and the accepted one among them or -1.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree):
        children.setdefault(parent, []).append(node)
    for parent, taken in zip((-1, *accepted), (*accepted, -1), strict=True):
        if parent in children:
            yield children[parent], taken


class Siblings:
    """Chances of the second and later children, of the first level and of the others, over all rows."""

    def __init__(self) -> None:
        self._tried = [[0.0] * _MOST_RANKS for _ in range(2)]
        self._right = [[0.0] * _MOST_RANKS for _ in range(2)]
        self._num_passed = 0  # steps that they have yet to fade for

    def fade(self) -> None:
        """A step has passed."""
        self._num_passed += 1

    def _settle(self) -> None:
        factor, self._num_passed = _FADE**self._num_passed, 0
        for counts in (*self._tried, *self._right):
            counts[:] = [count * factor for count in counts]

    def observe(self, is_later: bool, num_children: int, rank: int | None) -> None:
        """Learn from a node's children: that of `rank` was right, counted from 0, or none."""
        if self._num_passed:
            self._settle()
        for tried in range(1, num_children if rank is None else rank + 1):
            place = min(tried, _MOST_RANKS) - 1
            self._tried[is_later][place] += 1
            self._right[is_later][place] += tried == rank

    def worths(self, tree: Seq[int], first: float, later: float) -> list[float]:
        """``[n]`` the probability that each node is accepted, with all on the way to it.

        Args:
            tree: the parents of the nodes.
            first, later: of the row, the chance of a first child at the first level, and of one further down.
        """
        if self._num_passed:
            self._settle()
        chances = [
            [of_first, *((right + _PRIOR_WEIGHT * _FIRST_GUESS) / (tried + _PRIOR_WEIGHT)
                         for right, tried in zip(self._right[level], self._tried[level], strict=True))]
            for level, of_first in enumerate((first, later))
        ]  # fmt: skip
        # By parent: the probability that its way is accepted and none of its children so far is, and their number.
        left, ranks, found = [1.0] + [0.0] * len(tree), [0] * (len(tree) + 1), list[float]()
        for node, parent in enumerate(tree):
            worth = left[parent + 1] * chances[parent >= 0][min(ranks[parent + 1], _MOST_RANKS)]
            left[parent + 1] -= worth
            ranks[parent + 1] += 1
            left[node + 1] = worth
            found.append(worth)
        return found
