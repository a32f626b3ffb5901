"""The lengths of all rows' drafts together that have the best rate, where each further token is worth less."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heapreplace

__all__ = ["best_lengths"]


def best_lengths(
    worths: Seq[Seq[float]], gain: float, seconds: float, rise: Callable[[int], float]
) -> tuple[list[int], float]:
    """Take tokens, the worthiest first, as long as each yields more in its time than all before it in theirs.

    The rate ``(gain + Σ worth) ÷ (seconds + Σ rise)`` rises up to there and falls behind it, as no worth is above an
    earlier one of its row, and no rise below an earlier one.

    Args:
        worths: ``[B]`` per row what each further token of its draft is worth, in tokens; those of 0 are not taken.
        gain, seconds: tokens and time of the step without any of them; the time is above 0.
        rise: seconds of one token more, by the number of those taken before.

    Returns:
        ``[B]`` how many of each row are taken, and the rate in tokens per second.
    """
    lengths, count = [0] * len(worths), 0
    heap = [(-row[0], i) for i, row in enumerate(worths) if row and row[0] > 0]
    heapify(heap)
    while heap:
        negative, i = heap[0]
        more = rise(count)
        if -negative * seconds <= gain * more:
            break
        gain, seconds, count = gain - negative, seconds + more, count + 1
        lengths[i] += 1
        following = worths[i][lengths[i]] if lengths[i] < len(worths[i]) else 0.0
        if following > 0:
            heapreplace(heap, (-following, i))
        else:
            heappop(heap)
    return lengths, gain / seconds
