"""Budget policies that decide at random, and one that fails now and then."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome

SHALLOW = 2  # levels of trees


class ChancePolicy(BudgetPolicy):
    """Allots any number within the limits, and verifies any part of what was drafted. If it may allot none, it pauses.

    Args:
        seed: of its decisions.
        faults: see `Watch.faults`.
        least: the smallest share of a limit that it allots.
        trims: whether it takes back some drafted tokens.
        max_depth: how deep trees may be.
    """

    def __init__(
        self, seed: int, faults: Callable[[str], None], *, least: float, trims: bool, max_depth: int | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.least, self.trims, self.faults, self.max_depth = least, trims, faults, max_depth

    def allot(self, step: BudgetStep) -> list[int]:
        self.faults("policy")
        return [self.rng.randint(round(self.least * limit), limit) for limit in step.limits]

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        self.faults("policy")
        return [self.rng.randint(0, length) for length in draft.lengths] if self.trims else draft.lengths

    def observe(self, outcome: Outcome, stats: Any) -> None:
        self.faults("policy observes")
        self.pause = self.rng.choice((0, 0, 1, 3)) if self.least == 0.0 else 0


POLICIES: dict[str, Callable[[int, Callable[[str], None]], BudgetPolicy]] = {
    "chance": partial(ChancePolicy, least=0.0, trims=True),
    "all": partial(ChancePolicy, least=1.0, trims=False),
    "half": partial(ChancePolicy, least=0.5, trims=False),
    "shallow": partial(ChancePolicy, least=0.7, trims=True, max_depth=SHALLOW),
}
