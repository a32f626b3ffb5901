"""The chance that the next drafted tokens of each row are accepted, learnt from what was accepted before."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd_adaptive.chances import Siblings

__all__ = ["Acceptance"]

_PRIOR_WEIGHT = 6.0  # drafted tokens that the run's average counts for in a row's own estimate
_GLOBAL_MEMORY = 400.0  # drafted tokens that the run's average looks back on
_MEMORY_OF_PROBES = 8.0  # first tokens, and later ones, that it looks back on in a probe, as they are long ago
_FADE_UNDRAFTED = 0.97  # a step, for a row that drafts nothing: what was learnt of it grows old


class _Counts:
    """Accepted and tried tokens, by whether the token was the first of its draft or a later one; they fade."""

    __slots__ = ("first_accepted", "first_tried", "later_accepted", "later_tried", "step")

    def __init__(self, first: tuple[float, float] = (0.0, 0.0), later: tuple[float, float] = (0.0, 0.0)) -> None:
        self.first_accepted, self.first_tried = first
        self.later_accepted, self.later_tried = later
        self.step = 0  # the last one that they have faded for

    def fade(self, factor: float) -> None:
        self.first_accepted *= factor
        self.first_tried *= factor
        self.later_accepted *= factor
        self.later_tried *= factor

    def cut(self, most: float) -> None:
        """Count at most so many first tokens, and so many later ones; shares stay as they are."""
        first, later = most / max(self.first_tried, most), most / max(self.later_tried, most)
        self.first_accepted, self.first_tried = self.first_accepted * first, self.first_tried * first
        self.later_accepted, self.later_tried = self.later_accepted * later, self.later_tried * later

    def add(self, tried: int, accepted: int, is_first_accepted: bool) -> None:
        """A draft: how many of its levels were tried, and at how many of them a first child was accepted."""
        self.first_tried += 1
        self.first_accepted += is_first_accepted
        self.later_tried += tried - 1
        self.later_accepted += accepted - is_first_accepted


class Acceptance:
    """Per row two probabilities: that the first token of a draft is accepted, and each later one given those before.

    A row's own record, of its last `memory` drafted tokens, is mixed with the average of the run, so that a new row
    starts from there. In a tree both are of the first among siblings; how likely others are is learnt over all rows.
    """

    def __init__(self, memory: float) -> None:
        self._fade = 1.0 - 1.0 / max(memory, 1.0)
        self._rows: dict[str, _Counts] = {}
        self._step = 0
        self._all = _Counts(first=(1.0, 2.0), later=(1.6, 2.0))  # hopeful, until something is known
        self.siblings = Siblings()

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learn from one row's draft, a chain, in one step; tokens after the first rejected one teach nothing."""
        tried = min(num_accepted + 1, num_drafted)
        self._learn(request_id, tried, num_accepted, num_accepted > 0)

    def observe_tree(self, request_id: str, choices: Iterable[tuple[list[int], int]]) -> None:
        """Learn from one row's tree in one step: its `levels`. Only siblings on the accepted path teach."""
        first_children = list[bool]()
        for children, taken in choices:
            self.siblings.observe(len(first_children) > 0, len(children), children.index(taken) if taken >= 0 else None)
            first_children.append(children[0] == taken)
        self._learn(request_id, len(first_children), sum(first_children), first_children[:1] == [True])

    def look_anew(self) -> None:
        """Cut the weight of the run's average, which is old, before a probe is observed."""
        self._all.cut(_MEMORY_OF_PROBES)

    def begin_step(self) -> None:
        """A step is about to be observed. Rows for which it drafted nothing need not be."""
        self._step += 1
        self.siblings.fade()

    def _row(self, request_id: str, last: int) -> _Counts | None:
        """The counts of a row, faded for the steps up to `last`, in which nothing was drafted for it."""
        row = self._rows.get(request_id)
        if row is not None and row.step < last:
            row.fade(_FADE_UNDRAFTED ** (last - row.step))
            row.step = last
        return row

    def _learn(self, request_id: str, tried: int, accepted: int, is_first_accepted: bool) -> None:
        if tried == 0:
            return
        row = self._row(request_id, self._step - 1) or self._rows.setdefault(request_id, _Counts())
        row.step = self._step
        row.fade(self._fade**tried)
        row.add(tried, accepted, is_first_accepted)
        self._all.fade((1.0 - 1.0 / _GLOBAL_MEMORY) ** tried)
        self._all.add(tried, accepted, is_first_accepted)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these rows."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def gains(self, request_ids: Iterable[str], limits: Seq[int]) -> list[list[float]]:
        """``[B]`` up to each row's limit, the probability that a token of its draft is accepted, with all before it."""
        return [
            [first * later**depth for depth in range(limit)]
            for (first, later), limit in zip(self._chances(request_ids), limits, strict=True)
        ]

    def tree_gains(self, request_ids: Iterable[str], trees: Iterable[Seq[int]]) -> list[list[float]]:
        """``[B]`` per row the probability that each node of its tree is accepted, with all on the way to it."""
        pairs = zip(trees, self._chances(request_ids), strict=True)
        return [self.siblings.worths(tree, first, later) for tree, (first, later) in pairs]

    def _chances(self, request_ids: Iterable[str]) -> list[tuple[float, float]]:
        """``[B]`` chances of the first token of each row, and of a later one."""
        run = self._all
        first = (run.first_accepted + 0.5) / (run.first_tried + 1.0)
        later = (run.later_accepted + 0.5) / (run.later_tried + 1.0)
        found = []
        for request_id in request_ids:
            row = self._row(request_id, self._step) or _NOTHING
            gain = (row.first_accepted + _PRIOR_WEIGHT * first) / (row.first_tried + _PRIOR_WEIGHT)
            chance = (row.later_accepted + _PRIOR_WEIGHT * later) / (row.later_tried + _PRIOR_WEIGHT)
            found.append((gain, chance))
        return found


_NOTHING = _Counts()  # is known of a new row
