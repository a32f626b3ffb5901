"""The chances of a tree's nodes: by depth and rank (`Siblings`), or by a drafter's confidence (`Calibration`).

Siblings exclude each other. So by rank, what is learnt is the chance of a child *given that none of its earlier
siblings is right*; the chances of all children of a node then never add up to more than 1.

Confidences fall into bins, those of first children and of other siblings apart. A node's chance, given its parent, is
the share of nodes of its bin that were accepted where their parent was. A few imagined trials are mixed in, whose share
is the mean of the confidence itself and of the share over all bins. So confidences that mean nothing become the share
of their bin, whatever the order of the bins; and a bin that nothing was seen of is tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

__all__ = ["Calibration", "Siblings", "levels"]

_FADE = 0.99  # a step: what was learnt of bins that are no longer verified grows old, and they are tried again
_MOST_RANKS = 8  # later ones are taken for the last of these
_RANK_PRIOR, _FIRST_GUESS = 3.0, 0.25  # trials that the first guess counts for
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_NUM_BINS = 2 * (len(_EDGES) + 1)
_BIN_PRIOR = 2.0  # trials that are imagined in each bin


def levels(tree: Seq[int], accepted: Seq[int]) -> Iterator[tuple[list[int], int]]:
    """The levels of a verified tree at which the target chose: the children that it had there, never none, and the one
    of them that it took, or -1.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree):
        children.setdefault(parent, []).append(node)
    for parent, taken in zip((-1, *accepted), (*accepted, -1), strict=True):
        if parent in children:
            yield children[parent], taken


class _FadingCounts:
    """Trials by bin, and how many of them were right. They fade when they are read."""

    def __init__(self, num_bins: int) -> None:
        self._tried, self._right = [0.0] * num_bins, [0.0] * num_bins
        self._num_passed = 0  # steps that they have yet to fade for

    def fade(self) -> None:
        """A step has passed."""
        self._num_passed += 1

    def _settle(self) -> None:
        if self._num_passed:
            factor, self._num_passed = _FADE**self._num_passed, 0
            self._tried = [count * factor for count in self._tried]
            self._right = [count * factor for count in self._right]


class Siblings(_FadingCounts):
    """Chances of the second and later children, of the first level and of the others, over all rows."""

    def __init__(self) -> None:
        super().__init__(2 * _MOST_RANKS)

    def observe(self, is_later: bool, num_children: int, rank: int | None) -> None:
        """Learn from a node's children: that of `rank` was right, counted from 0, or none."""
        self._settle()
        for tried in range(1, num_children if rank is None else rank + 1):
            place = is_later * _MOST_RANKS + min(tried, _MOST_RANKS) - 1
            self._tried[place] += 1
            self._right[place] += tried == rank

    def worths(self, tree: Seq[int], first: float, later: float) -> list[float]:
        """``[n]`` the probability that each node is accepted, with all on the way to it.

        Args:
            first, later: of the row, the chance of a first child at the first level, and of one further down.
        """
        self._settle()
        shares = [
            (right + _RANK_PRIOR * _FIRST_GUESS) / (tried + _RANK_PRIOR)
            for right, tried in zip(self._right, self._tried, strict=True)
        ]
        chances = [first, *shares[:_MOST_RANKS]], [later, *shares[_MOST_RANKS:]]
        # By parent: the probability that its way is accepted and none of its children so far is, and their number.
        left, ranks, found = [1.0] + [0.0] * len(tree), [0] * (len(tree) + 1), list[float]()
        for node, parent in enumerate(tree):
            worth = left[parent + 1] * chances[parent >= 0][min(ranks[parent + 1], _MOST_RANKS)]
            left[parent + 1] -= worth
            ranks[parent + 1] += 1
            left[node + 1] = worth
            found.append(worth)
        return found


class Calibration(_FadingCounts):
    """Chances from the confidences of one drafter."""

    def __init__(self) -> None:
        super().__init__(_NUM_BINS)

    def observe(self, choices: Iterable[tuple[list[int], int]], confidences: Seq[float]) -> None:
        """Learn from a tree in one step: its `levels`, and the `confidences` of its nodes."""
        self._settle()
        for children, taken in choices:
            kind = 0
            for node in children:
                place = kind + bisect_right(_EDGES, confidences[node])
                self._tried[place] += 1
                self._right[place] += node == taken
                kind = _NUM_BINS // 2

    def lines(self) -> list[tuple[float, float]]:
        """By bin, a node's chance at confidence 0, and by how much it is more at confidence 1."""
        self._settle()
        overall = (sum(self._right) + 0.5) / (sum(self._tried) + 1.0)
        start, half = _BIN_PRIOR * overall / 2, _BIN_PRIOR / 2
        return [
            ((right + start) / (tried + _BIN_PRIOR), half / (tried + _BIN_PRIOR))
            for right, tried in zip(self._right, self._tried, strict=True)
        ]

    def worths(self, trees: Iterable[Seq[int]], confidences: Iterable[Seq[float]]) -> list[list[float]]:
        """``[B]`` for each node of trees the probability that it is accepted, with all on the way to it.

        Siblings exclude each other: where the chances of a node's children add up to more than 1, all but the first
        child's, which is the best known, are scaled down.
        """
        lines = self.lines()
        return [_worths(tree, told, lines) for tree, told in zip(trees, confidences, strict=True)]


def _worths(tree: Seq[int], confidences: Seq[float], lines: Seq[tuple[float, float]]) -> list[float]:
    firsts, others, chances = [0.0] * (len(tree) + 1), [0.0] * (len(tree) + 1), list[float]()  # by parent
    for parent, confidence in zip(tree, confidences, strict=True):
        is_first, place = not firsts[parent + 1], bisect_right(_EDGES, confidence)
        start, more = lines[place if is_first else place + _NUM_BINS // 2]  # no chance is 0
        chances.append(chance := start + more * confidence)
        if is_first:
            firsts[parent + 1] = chance
        else:
            others[parent + 1] += chance
    found, seen = [1.0], set[int]()  # of the origin, then of the nodes
    for parent, chance in zip(tree, chances, strict=True):
        if parent in seen:
            chance *= min(1.0, (1.0 - firsts[parent + 1]) / others[parent + 1])
        seen.add(parent)
        found.append(found[parent + 1] * chance)
    return found[1:]
