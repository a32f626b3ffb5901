"""A budget policy that ends a draft where its drafter is not sure, as AdaEDL does."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from emssd.drafting import BudgetPolicy, BudgetStep, DraftedNode


class EntropyBudget(BudgetPolicy):
    """Goes on as long as a token's acceptance is at least `least` by AdaEDL's bound (arXiv 2410.18351, §3)."""

    def __init__(self, least: float = 0.4, scale: float = 0.2) -> None:
        self._least, self._scale = least, scale

    def allot(self, step: BudgetStep) -> Sequence[int]:
        return step.limits

    def goes_on(self, step: BudgetStep, newest: Sequence[Sequence[DraftedNode]]) -> list[bool]:
        bounds = [[1 - sqrt(self._scale * node.entropy) for node in nodes] for nodes in newest]
        return [max(row, default=0.0) >= self._least for row in bounds]
