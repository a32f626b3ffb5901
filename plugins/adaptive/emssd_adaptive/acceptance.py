"""How likely the next drafted tokens of each row are accepted, learnt from what was accepted before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["Acceptance"]

_Array = npt.NDArray[np.float64]

_PRIOR_WEIGHT = 3.0  # drafted tokens that the run's average counts for in a row's own estimate
_GLOBAL_MEMORY = 400.0  # drafted tokens that the run's average looks back on
_FADE_UNDRAFTED = 0.97  # a step, for a row that drafts nothing: what was learnt of it grows old


class _Counts:
    """Accepted and rejected tokens, by whether the token was the first of its draft or a later one; they fade."""

    __slots__ = ("accepted", "tried")

    def __init__(self) -> None:
        self.accepted = [0.0, 0.0]
        self.tried = [0.0, 0.0]

    def fade(self, factor: float) -> None:
        self.accepted = [value * factor for value in self.accepted]
        self.tried = [value * factor for value in self.tried]

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A draft; tokens behind the first rejected one tell nothing."""
        self.tried[0] += 1
        self.accepted[0] += num_accepted > 0
        self.tried[1] += min(num_accepted, num_drafted - 1)
        self.accepted[1] += max(0, num_accepted - 1)


class Acceptance:
    """Per row two probabilities: that the first token of a draft is accepted, and each later one given those before.

    A row's own record is mixed with the average of the run, so that a new row starts from there.

    Args:
        memory: drafted tokens that a row's record looks back on.
    """

    def __init__(self, memory: float) -> None:
        self._fade = 1.0 - 1.0 / max(memory, 1.0)
        self._rows: dict[str, _Counts] = {}
        self._all = _Counts()
        self._all.accepted, self._all.tried = [1.0, 1.6], [2.0, 2.0]  # hopeful, until something is known

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

    def gains(self, request_ids: Iterable[str], depth: int) -> _Array:
        """``[B, depth]`` probability that each token of a row's draft is accepted, with all before it."""
        first, later = ((self._all.accepted[i] + 0.5) / (self._all.tried[i] + 1.0) for i in range(2))
        chances = []
        for request_id in request_ids:
            row = self._rows.get(request_id)
            if row is None:
                chances.append((first, later))
            else:
                chances.append(
                    (
                        (row.accepted[0] + _PRIOR_WEIGHT * first) / (row.tried[0] + _PRIOR_WEIGHT),
                        (row.accepted[1] + _PRIOR_WEIGHT * later) / (row.tried[1] + _PRIOR_WEIGHT),
                    )
                )
        table = np.asarray(chances).reshape(-1, 2)
        gains: _Array = table[:, :1] * table[:, 1:] ** np.arange(depth)
        return gains
