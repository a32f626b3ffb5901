"""The lengths of all rows' drafts together that have the best rate."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heapreplace
from itertools import chain, pairwise

import numpy as np

__all__ = ["best_limits", "best_lengths", "blocks"]


def best_limits(
    worths: Seq[Seq[float]], gain: float, seconds: float, rises: Seq[float], levels: Seq[tuple[int, float]]
) -> list[int]:
    """The lengths of drafts that are yet to be made: what making them takes counts, too.

    For each way to limit the drafts, nodes are taken as by `best_lengths`, the worthiest first. As worths fall, the
    first nodes in that order are first nodes of each row; all numbers of them and all limits are looked at together.

    Args:
        worths: ``[B]`` per row what each node of its draft is worth, in tokens, never more than the one before it.
        gain, seconds: tokens and time of the step without any of them; the time is above 0.
        rises: seconds of the first node, of the second, and so on, for as many as there are.
        levels: ways to limit the drafts: the most nodes of a row, and the seconds that drafting so many takes beside
            those of `rises`.

    Returns:
        ``[B]`` how many of each row to draft: none, unless some are better than none.
    """
    lengths = np.array([len(row) for row in worths])
    flat = np.fromiter(chain.from_iterable(worths), np.float64)
    order = np.argsort(-flat, kind="stable")  # of equal nodes of a row, the first comes first
    rows = np.repeat(np.arange(len(lengths)), lengths)[order]
    places = (np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths))[order]
    most, more = np.array(levels).T[:, :, None]
    taken = places < most  # [levels, nodes]
    gains = gain + np.cumsum(taken * flat[order], axis=1)
    rates = gains / (seconds + more + np.cumsum(rises)[np.cumsum(taken, axis=1) - 1])
    level, last = np.unravel_index(np.argmax(rates), rates.shape)
    if rates[level, last] <= gain / seconds:
        return [0] * len(worths)
    return np.bincount(rows[: last + 1][taken[level, : last + 1]], minlength=len(worths)).tolist()


def best_lengths(
    worths: Seq[Seq[float]], gain: float, seconds: float, rise: Callable[[int], float]
) -> tuple[list[int], float]:
    """Take nodes, the worthiest first, as long as each yields more in its time than all before it in theirs.

    One heap holds the next of each row. What is taken of a row are its first nodes. Where a node is worth more than one
    before it, both are taken together, as the `blocks` of the row say. A step of ``n`` further nodes has the rate
    ``(gain + Σ worth) ÷ (seconds + Σ rise)``, no rise being below an earlier one.

    No other lengths have a better rate, if no node is worth more than one before it in its row, or if all rises are
    equal. Proof: λ is the best rate if and only if the most of ``gain + Σ worth − λ (seconds + Σ rise)`` is 0.

    - Where worths fall, the most for a number of nodes are the worthiest, which are first nodes. Their sum is concave
      in that number, and time is convex. So the difference has one peak: at the first node that does not pay.
    - At equal rises, rows are apart, and each row's ``Σ worth`` less a line is largest at a corner of the least concave
      curve above it. Blocks end at these corners.

    In all other cases the choice is among whole blocks, and its rate is never below that without any node.

    Args:
        worths: ``[B]`` per row what each further node of its draft is worth, in tokens; those of 0 are not taken.
        gain, seconds: tokens and time of the step without any of them; the time is above 0.
        rise: seconds of one node more, by the number of those taken before.

    Returns:
        ``[B]`` how many of each row are taken, and the rate in tokens per second.
    """
    lengths, count = [0] * len(worths), 0
    rows = [blocks(row) for row in worths]
    places = [0] * len(rows)
    heap = [(-row[0][0], i) for i, row in enumerate(rows) if row and row[0][0] > 0]
    heapify(heap)
    while heap:
        negative, i = heap[0]
        size = rows[i][places[i]][1]
        more = rise(count) if size == 1 else sum(map(rise, range(count, count + size)))
        if -negative * size * seconds <= gain * more:
            if size == 1:
                break  # no other is worth more, and none is cheaper
            heappop(heap)
            continue
        gain, seconds, count = gain - negative * size, seconds + more, count + size
        lengths[i] += size
        places[i] += 1
        following = rows[i][places[i]][0] if places[i] < len(rows[i]) else 0.0
        if following > 0:
            heapreplace(heap, (-following, i))
        else:
            heappop(heap)
    return lengths, gain / seconds


def blocks(worths: Seq[float]) -> list[tuple[float, int]]:
    """Nodes in their order, in blocks whose mean worth falls: each is the beginning that is worth most on the mean.

    Returns:
        The mean and the size of each block.
    """
    if all(later <= earlier for earlier, later in pairwise(worths)):
        return [(worth, 1) for worth in worths]
    found: list[tuple[float, int]] = []
    for worth in worths:
        mean, size = worth, 1
        while found and found[-1][0] < mean:
            before, number = found.pop()
            mean, size = (before * number + mean * size) / (number + size), number + size
        found.append((mean, size))
    return found
