"""The worth of the nodes of a drafter's next tree by their place in the row."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate

__all__ = ["Profile"]

_MEMORY = 32.0  # drafts that the mean looks back on
_MEMORY_OF_PROBES = 2.0  # in a probe, as those before it are long ago
_BEYOND = 0.9  # of the worth of the node before, where no draft was as long
_AGE = 0.05  # a step with drafts, for places that none of them reached
_ROW_FADE = 0.8  # a draft: how fast a row's own ratio forgets
_FADE_UNDRAFTED = 0.97  # a step, for a row that drafts nothing
_MOST = 4.0  # times the mean, at which a row's single draft is counted


class Profile:
    """The mean worth of the first node of a draft, of the second, …; and each row's ratio to it.

    It sees drafts before they are trimmed, so that it does not take the best for all.
    """

    def __init__(self) -> None:
        self._means: list[float] = []
        self._counts: list[float] = []
        self._rows: dict[str, tuple[float, float]] = {}  # sum of ratios, and their number; both fade

    @property
    def is_known(self) -> bool:
        """Whether there was a draft."""
        return bool(self._means)

    def observe(self, request_ids: Iterable[str], worths: Seq[Seq[float]], *, is_probe: bool = False) -> None:
        """Learn from a draft of some rows: ``worths [B]`` of its nodes, row by row."""
        memory = _MEMORY_OF_PROBES if is_probe else _MEMORY
        for request_id, row in zip(request_ids, worths, strict=True):
            total, number = self._rows.get(request_id, (0.0, 0.0))
            if not row:
                self._rows[request_id] = (total * _FADE_UNDRAFTED, number * _FADE_UNDRAFTED)
                continue
            usual = sum(self._means[: len(row)])
            ratio = min(sum(row[: len(self._means)]) / usual, _MOST) if usual > 0 else 1.0
            self._rows[request_id] = (total * _ROW_FADE + ratio, number * _ROW_FADE + 1.0)
            more = len(row) - len(self._means)
            self._means += [0.0] * more
            self._counts += [0.0] * more
            counts = [count + 1.0 if count + 1.0 < memory else memory for count in self._counts[: len(row)]]
            self._counts[: len(row)] = counts
            self._means[: len(row)] = [
                mean + (worth - mean) / count for mean, worth, count in zip(self._means, row, counts, strict=False)
            ]
        self._age(max(map(len, worths), default=0))

    def _age(self, longest: int) -> None:
        """Believe places less that no draft of this step reached, and hope for more there."""
        for place in range(max(longest, 1), len(self._means)):
            self._counts[place] *= 1.0 - _AGE
            self._means[place] += (self._means[place - 1] * _BEYOND - self._means[place]) * _AGE

    def worths(self, request_ids: Iterable[str], limits: Seq[int]) -> list[list[float]]:
        """``[B]`` up to each row's limit, what the nodes of its next draft are expected to be worth; it never rises."""
        longest, usual = max(limits, default=0), list(accumulate(self._means, min))
        for _ in range(longest - len(usual)):
            usual.append(usual[-1] * _BEYOND)
        found = []
        for request_id, limit in zip(request_ids, limits, strict=True):
            total, number = self._rows.get(request_id, (0.0, 0.0))
            ratio = (total + 1.0) / (number + 1.0)
            found.append([value if (value := worth * ratio) < 1.0 else 1.0 for worth in usual[:limit]])
        return found

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these rows."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)
