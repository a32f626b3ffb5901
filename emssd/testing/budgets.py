"""A budget policy that follows a script, so that Hypothesis can draw, and shrink, all that a policy does."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode

__all__ = ["ScriptedBudget"]


class ScriptedBudget(BudgetPolicy):
    """Allots and trims as it is told, whatever the rows are.

    Args:
        script: the ``i``-th decision about a row, counted over all rows and steps, is entry ``i`` modulo the script's
            length: the most tokens to allot, and the most to keep of what was drafted.
        ends: whether it ends drafts between passes, where they have as many levels as it keeps tokens.
    """

    def __init__(self, script: Seq[tuple[int, int]], *, ends: bool = False) -> None:
        self._script = script
        self._num_decisions = 0
        if ends:
            self.goes_on = self._goes_on  # type: ignore[method-assign]  # others are not asked

    def allot(self, step: BudgetStep) -> list[int]:
        self._num_decisions += len(step.batch)
        self._num_levels = 0
        entries = self._entries(len(step.batch))
        return [min(limit, allotted) for limit, (allotted, _) in zip(step.limits, entries, strict=True)]

    def _goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
        self._num_levels += 1
        return [self._num_levels < kept for _, kept in self._entries(len(step.batch))]

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        entries = self._entries(len(step.batch))
        return [min(length, kept) for length, (_, kept) in zip(draft.lengths, entries, strict=True)]

    def _entries(self, num_rows: int) -> list[tuple[int, int]]:
        first = self._num_decisions - num_rows
        return [self._script[(first + row) % len(self._script)] for row in range(num_rows)]
