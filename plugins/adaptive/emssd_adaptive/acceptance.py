"""How likely the next drafted tokens of each row are accepted, learnt from what was accepted before."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

__all__ = ["Acceptance"]

_PRIOR_WEIGHT = 3.0  # drafted tokens that the run's average counts for in a row's own estimate
_GLOBAL_MEMORY = 400.0  # drafted tokens that the run's average looks back on
_FADE_UNDRAFTED = 0.97  # a step, for a row that drafts nothing: what was learnt of it grows old


class _Counts:
    """Accepted and tried tokens, by whether the token was the first of its draft or a later one; they fade."""

    __slots__ = ("first_accepted", "first_tried", "later_accepted", "later_tried")

    def __init__(self, first: tuple[float, float] = (0.0, 0.0), later: tuple[float, float] = (0.0, 0.0)) -> None:
        self.first_accepted, self.first_tried = first
        self.later_accepted, self.later_tried = later

    def fade(self, factor: float) -> None:
        self.first_accepted *= factor
        self.first_tried *= factor
        self.later_accepted *= factor
        self.later_tried *= factor

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A draft; tokens behind the first rejected one tell nothing."""
        self.first_tried += 1
        if num_accepted:
            self.first_accepted += 1
            self.later_accepted += num_accepted - 1
            self.later_tried += min(num_accepted, num_drafted - 1)


class Acceptance:
    """Per row two probabilities: that the first token of a draft is accepted, and each later one given those before.

    A row's own record is mixed with the average of the run, so that a new row starts from there.

    Args:
        memory: drafted tokens that a row's record looks back on.
    """

    def __init__(self, memory: float) -> None:
        self._fade = 1.0 - 1.0 / max(memory, 1.0)
        self._rows: dict[str, _Counts] = {}
        self._all = _Counts(first=(1.0, 2.0), later=(1.6, 2.0))  # hopeful, until something is known

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """What became of one row's draft in one step."""
        row = self._rows.setdefault(request_id, _Counts())
        if num_drafted == 0:
            row.fade(_FADE_UNDRAFTED)
            return
        tried = min(num_accepted + 1, num_drafted)
        row.fade(self._fade**tried)
        row.add(num_drafted, num_accepted)
        self._all.fade((1.0 - 1.0 / _GLOBAL_MEMORY) ** tried)
        self._all.add(num_drafted, num_accepted)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these rows."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def gains(self, request_ids: Iterable[str], limits: Seq[int]) -> list[list[float]]:
        """``[B]`` up to each row's limit, the probability that a token of its draft is accepted, with all before it."""
        run = self._all
        first = (run.first_accepted + 0.5) / (run.first_tried + 1.0)
        later = (run.later_accepted + 0.5) / (run.later_tried + 1.0)
        gains = []
        for request_id, limit in zip(request_ids, limits, strict=True):
            row = self._rows.get(request_id, _NOTHING)
            gain = (row.first_accepted + _PRIOR_WEIGHT * first) / (row.first_tried + _PRIOR_WEIGHT)
            chance = (row.later_accepted + _PRIOR_WEIGHT * later) / (row.later_tried + _PRIOR_WEIGHT)
            gains.append([gain * chance**depth for depth in range(limit)])
        return gains


_NOTHING = _Counts()  # is known of a new row
