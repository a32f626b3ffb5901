"""The lengths of all rows' drafts together that have the best rate."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from operator import itemgetter

__all__ = ["best_lengths", "best_limits"]


def best_limits(
    worths: Seq[Seq[float]], gain: float, seconds: float, rises: Seq[float], levels: Seq[tuple[int, float]]
) -> list[int]:
    """The best lengths of drafts that are yet to be made, with the time of drafting.

    For each way to limit the drafts, nodes are taken as by `best_lengths`; the best of all these choices is the result.

    Args:
        worths: ``[B]`` per row what each node of its draft is worth, in tokens, never more than the one before it.
        gain, seconds, rises: as for `best_lengths`.
        levels: ways to limit the drafts: the most nodes of a row, and the seconds that drafting so many takes beside
            those of `rises`.

    Returns:
        ``[B]`` how many nodes of each row to draft: none, unless some are better than none.
    """
    nodes = [(worth, place, row) for row, line in enumerate(worths) for place, worth in enumerate(line)]
    nodes.sort(key=itemgetter(0), reverse=True)  # equal nodes of a row stay in their order
    best, best_rate = nodes[:0], gain / seconds
    for most, more in levels:
        total, time, count, able = gain, seconds + more, 0, [node for node in nodes if node[1] < most]
        for (worth, _, _), rise in zip(able, rises, strict=False):
            if worth * time <= total * rise:
                break
            total, time, count = total + worth, time + rise, count + 1
        if total / time > best_rate:
            best, best_rate = able[:count], total / time
    lengths = [0] * len(worths)
    for _, _, row in best:
        lengths[row] += 1
    return lengths


def best_lengths(worths: Seq[Seq[float]], gain: float, seconds: float, rises: Seq[float]) -> tuple[list[int], float]:
    """Take nodes, the worthiest first, as long as each yields more in its time than all before it in theirs.

    What is taken of a row are its first nodes. Where a node is worth more than one before it, both are taken together,
    as the `blocks` of the row say. A step of ``n`` further nodes has the rate
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
        rises: seconds of the first node, of the second, and so on, for as many as there are.

    Returns:
        ``[B]`` how many of each row are taken, and the rate in tokens per second.
    """
    lengths, count, given_up = [0] * len(worths), 0, set[int]()
    whole = [(mean, size, row) for row, line in enumerate(worths) for mean, size in blocks(line)]
    whole.sort(key=itemgetter(0), reverse=True)  # equal blocks of a row stay in their order
    for mean, size, row in whole:
        if row in given_up:
            continue
        more = rises[count] if size == 1 else sum(rises[count : count + size])
        if mean <= 0 or mean * size * seconds <= gain * more:
            if size == 1:
                break  # no other is worth more, and none is cheaper
            given_up.add(row)
            continue
        gain, seconds, count = gain + mean * size, seconds + more, count + size
        lengths[row] += size
    return lengths, gain / seconds


def blocks(worths: Seq[float]) -> list[tuple[float, int]]:
    """Nodes in their order, in blocks whose mean worth falls: each is the beginning that is worth most on the mean. Of
    each block its mean and its size.
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
