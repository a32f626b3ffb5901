"""What a drafter's confidence is worth: how often nodes of about that confidence were accepted.

The rule: confidences fall into bins, those of first children and of other siblings apart. A node's chance, given its
parent, is the share of nodes of its bin that were accepted where their parent was. A few imagined trials are mixed in,
whose share is the mean of the confidence itself and of the share over all bins. So confidences that mean nothing become
the share of their bin, whatever the order of the bins; and a bin that nothing was seen of is tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq

__all__ = ["Calibration"]

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_NUM_BINS = 2 * (len(_EDGES) + 1)
_PRIOR_WEIGHT = 4.0  # trials that are imagined in each bin
_FADE = 0.99  # a step


class Calibration:
    """Chances from the confidences of one drafter."""

    def __init__(self) -> None:
        self._tried = [0.0] * _NUM_BINS  # those of first children, then those of others
        self._right = [0.0] * _NUM_BINS

    def fade(self) -> None:
        """A step has passed."""
        self._tried = [count * _FADE for count in self._tried]
        self._right = [count * _FADE for count in self._right]

    def observe(self, confidence: float, is_first: bool, is_accepted: bool) -> None:
        """What became of a node whose parent was accepted; `is_first` among its siblings or not."""
        place = _bin(confidence, is_first)
        self._tried[place] += 1
        self._right[place] += is_accepted

    def chances(self, tree: Seq[int], confidences: Seq[float]) -> list[float]:
        """``[n]`` for each node the probability that it is accepted, given that its parent is; see `worths`."""
        overall = (sum(self._right) + 0.5) / (sum(self._tried) + 1.0)
        found, parents = list[float](), set[int]()
        for parent, confidence in zip(tree, confidences, strict=True):
            place, guess = _bin(confidence, parent not in parents), (confidence + overall) / 2
            parents.add(parent)
            found.append((self._right[place] + _PRIOR_WEIGHT * guess) / (self._tried[place] + _PRIOR_WEIGHT))
        return found

    def worths(self, tree: Seq[int], confidences: Seq[float]) -> list[float]:
        """``[n]`` the probability that each node is accepted, with all on the way to it.

        Siblings exclude each other: where the chances of a node's children add up to more than 1, all are scaled down.

        Args:
            tree: the parents of the nodes.
            confidences: of the nodes.
        """
        chances, totals = self.chances(tree, confidences), [0.0] * (len(tree) + 1)
        for parent, chance in zip(tree, chances, strict=True):
            totals[parent + 1] += chance
        found: list[float] = []
        for parent, chance in zip(tree, chances, strict=True):
            found.append((found[parent] if parent >= 0 else 1.0) * chance / max(1.0, totals[parent + 1]))
        return found


def _bin(confidence: float, is_first: bool) -> int:
    return bisect_right(_EDGES, confidence) + (0 if is_first else len(_EDGES) + 1)
