"""A budget policy that follows a script, so that Hypothesis can draw, and shrink, all that a policy does."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting import BudgetPolicy, Draft
from emssd.sequences import Batch

__all__ = ["ScriptedBudget"]


class ScriptedBudget(BudgetPolicy):
    """Allots and trims as it is told, whatever the rows are.

    Args:
        script: the ``i``-th decision about a row, counted over all rows and steps, is entry ``i`` modulo the script's
            length: the most tokens to allot, and the most to keep of what was drafted.
    """

    def __init__(self, script: Seq[tuple[int, int]]) -> None:
        self._script = script
        self._num_decisions = 0

    def allot(self, batch: Batch, limits: Seq[int], num_other_tokens: int, stage: int = 0) -> list[int]:
        self._num_decisions += len(batch)
        return [min(limit, allotted) for limit, (allotted, _) in zip(limits, self._entries(batch), strict=True)]

    def trim(self, batch: Batch, draft: Draft, num_other_tokens: int, stage: int = 0) -> list[int]:
        return [min(length, kept) for length, (_, kept) in zip(draft.lengths, self._entries(batch), strict=True)]

    def _entries(self, batch: Batch) -> list[tuple[int, int]]:
        first = self._num_decisions - len(batch)
        return [self._script[(first + row) % len(self._script)] for row in range(len(batch))]
