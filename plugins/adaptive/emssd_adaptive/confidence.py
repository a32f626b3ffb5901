"""Calibrates a drafter's confidence: how often nodes of about that confidence were accepted.

The rule: confidences fall into bins, those of first children and of other siblings apart. A node's chance, given its
parent, is the share of nodes of its bin that were accepted where their parent was. A few imagined trials are mixed in,
whose share is the mean of the confidence itself and of the share over all bins. So confidences that mean nothing become
the share of their bin, whatever the order of the bins; and a bin that nothing was seen of is tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq

__all__ = ["Calibration"]

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_NUM_BINS = 2 * (len(_EDGES) + 1)
_PRIOR_WEIGHT = 2.0  # trials that are imagined in each bin
_FADE = 0.99  # a step


class Calibration:
    """Chances from the confidences of one drafter."""

    def __init__(self) -> None:
        self._tried = [0.0] * _NUM_BINS  # those of first children, then those of others
        self._right = [0.0] * _NUM_BINS
        self._num_passed = 0  # steps that they have yet to fade for

    def fade(self) -> None:
        """A step has passed."""
        self._num_passed += 1

    def _settle(self) -> None:
        factor, self._num_passed = _FADE**self._num_passed, 0
        self._tried = [count * factor for count in self._tried]
        self._right = [count * factor for count in self._right]

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
        start, half = _PRIOR_WEIGHT * overall / 2, _PRIOR_WEIGHT / 2
        return [
            ((right + start) / (tried + _PRIOR_WEIGHT), half / (tried + _PRIOR_WEIGHT))
            for right, tried in zip(self._right, self._tried, strict=True)
        ]

    def worths(self, trees: Iterable[Seq[int]], confidences: Iterable[Seq[float]]) -> list[list[float]]:
        """``[B]`` for each node of some trees the probability that it is accepted, with all on the way to it.

        Siblings exclude each other: where the chances of a node's children add up to more than 1, all but the first
        child's, which is the best known, are scaled down.

        Args:
            trees: ``[B]`` the parents of the nodes.
            confidences: ``[B]`` of the nodes.
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
