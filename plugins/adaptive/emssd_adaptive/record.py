"""One drafter, as a budget policy sees it from outside."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import inf

from emssd.drafting import Draft, Outcome, StageStats
from emssd_adaptive.acceptance import FIRST, Acceptance
from emssd_adaptive.cost import CostLine

__all__ = ["Allowance", "DrafterRecord"]

_TRY_SHARE = 0.005  # of all time
_FADE = 0.98  # a draft, of the spread


class Allowance:
    """The time for trying the other choice, to see whether it pays by now: 0.5 % of all. The first try is free."""

    def __init__(self, interval: int) -> None:
        self._interval, self._num_steps, self._seconds = interval, 0, inf

    def count(self, seconds: float, *, is_other: bool, is_try: bool) -> None:
        """A step took so many seconds. `is_other`: it was one of the other choice; `is_try`: to try it."""
        self._num_steps = 0 if is_other else self._num_steps + 1
        self._seconds = 0.0 if is_other and is_try else self._seconds + _TRY_SHARE * seconds

    @property
    def is_due(self) -> bool:
        """Whether the other choice was not taken for `interval` steps."""
        return self._num_steps >= self._interval

    def covers(self, seconds: float) -> bool:
        """Whether a try is due, and there are so many seconds for it."""
        return self.is_due and self._seconds >= seconds


class DrafterRecord:
    """The worth of a drafter's drafts, the time that they take, and when to try it again.

    Attributes:
        cost: of drafting, by a constant, tokens of the longest row, all tokens, and tokens that the drafter has to see.
        worths: ``[B]`` of the nodes that were drafted in this step.
        is_try: this step drafts only to see whether it pays by now.
    """

    def __init__(self, memory: float, interval: int) -> None:
        self.acceptance, self.tries, self.cost = Acceptance(memory), Allowance(interval), CostLine(4)
        self.worths, self.is_try, self._is_sure = list[list[float]](), False, True
        self._deviation, self._most_deviation = 0.0, 1e-9

    @property
    def spread(self) -> float:
        """From 0, if drafts are worth what was expected, to 1, if each turns out to be right or wrong."""
        return min(1.0, self._deviation / self._most_deviation)

    def see(self, request_ids: Seq[str], draft: Draft) -> None:
        """Work out what the nodes of a draft are worth."""
        self._is_sure = draft.confidence is None and draft.parents is None
        rows = map(self.acceptance.row, request_ids)
        self.worths = [self.acceptance.worths(draft, index, row) for index, row in enumerate(rows)]

    def observe(self, outcome: Outcome, stats: StageStats, lengths: Seq[int], pace: float) -> None:
        """Learn from a step; `lengths` ``[B]`` are the tokens that each row had before it, `pace` the machine's."""
        acceptance, num_unseen, worths = self.acceptance, 0, self.worths or [[]] * len(lengths)
        if self.is_try and any(stats.drafted):
            acceptance.look_anew()
        for index, limit in enumerate(stats.budget):
            if not limit:
                continue
            row = acceptance.row(outcome.batch.request_ids[index])
            if stats.drafted[index]:
                acceptance.observe(outcome.draft, index, outcome.accepted[index], row)
            if not self._is_sure:
                expected, first = acceptance.chance(FIRST, row), worths[index][0] if worths[index] else 0.0
                self._deviation = _FADE * self._deviation + (first - expected) ** 2
                self._most_deviation = _FADE * self._most_deviation + expected * (1.0 - expected)
                path = outcome.accepted[index]
                seen = [float(node in path) for node in range(len(worths[index]))] if self.is_try else worths[index]
                acceptance.expect(seen, limit, row)
            num_unseen += lengths[index] - row.num_shown
            row.num_shown, row.step = lengths[index], row.step + 1
        acceptance.end_step(with_drafts=any(stats.budget))
        if any(worths):  # to find nothing is quick, and says nothing about what it takes to draft
            self.cost.observe([1, max(stats.budget), sum(stats.budget), num_unseen], stats.seconds / pace)
        self.worths = []
