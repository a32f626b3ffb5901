"""A budget policy that ends drafts between passes, for the levels that it was told of to be looked at."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode

__all__ = ["EndsByTurns"]


class EndsByTurns(BudgetPolicy):
    """Lets the drafts of the rows have one level, two, three and so on, in turn; row by row, and step by step.

    Attributes:
        num_asked: how often it was asked.
        depths: of all drafts of steps in which it was asked.
        told: nodes of all levels.
    """

    def __init__(self) -> None:
        self.num_asked, self.depths, self.told = 0, list[int](), list[DraftedNode]()
        self._num_steps, self._level = 0, 0

    def _most(self, row: int) -> int:
        return 1 + (row + self._num_steps) % 4

    def allot(self, step: BudgetStep) -> Seq[int]:
        self._num_steps += 1
        self._level = 0
        return step.limits

    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
        self.num_asked, self._level = self.num_asked + 1, self._level + 1
        assert len(newest) == len(step.batch)
        assert any(newest)
        for row, nodes in enumerate(newest):
            assert not nodes or self._level <= self._most(row), "a row that ended is drafted further"
            self.told += nodes
        return [self._level < self._most(row) for row in range(len(newest))]

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        if self._level:
            for row in range(draft.num_rows):
                at = {-1: 0}
                for node, parent in enumerate(draft.tree(row)):
                    at[node] = at[parent] + 1
                assert max(at.values()) <= self._most(row)
                self.depths.append(max(at.values()))
        return draft.lengths

    def check(self) -> None:
        """Assert that it ended drafts and saw what can be."""
        assert {1, 2, 3} <= {*self.depths}
        assert all(0 <= node.chance <= node.confidence + 1e-12 and node.confidence <= 1 for node in self.told)
        assert all(node.entropy >= 0 for node in self.told)
        assert len({node.entropy for node in self.told}) > 1
