"""`Told`: a drafter that drafts what a test says, and remembers what it hears."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import Draft, Drafter, Outcome
from emssd.sequences import Batch


class Told(Drafter):
    """Drafts what it is told, as far as the budget allows, and remembers what it hears."""

    def __init__(self, draft: Draft, most: int = 9) -> None:
        self.draft, self.num_speculative_tokens = draft, most
        self.drafts_trees = draft.parents is not None
        self.budgets: list[list[int]] = []
        self.outcomes: list[Outcome] = []
        self.released: list[str] = []
        self.num_resets = 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.budgets.append(list(budget))
        assert max(budget) <= self.num_speculative_tokens
        limits = [max(0, row.num_remaining - 1) for row in batch]
        allowed = self.draft.shallow(limits)
        return allowed.cut([min(length, limit) for length, limit in zip(allowed.lengths, budget, strict=True)])

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def release(self, request_ids: Iterable[str]) -> None:
        self.released += request_ids

    def reset(self) -> None:
        self.num_resets += 1
