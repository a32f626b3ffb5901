"""How many tokens each row may draft in a step: the `BudgetPolicy` interface, and the simplest policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting.draft import Draft, Outcome
from emssd.errors import ConfigError
from emssd.metrics.stats import StepStats
from emssd.sequences import Batch

__all__ = ["BudgetPolicy", "FixedBudget", "HeldBudget"]


class BudgetPolicy(ABC):
    """Spends the tokens of a verification step where they are expected to be accepted. It cannot change the output."""

    @abstractmethod
    def allot(self, batch: Batch, limits: Seq[int], num_other_tokens: int, stage: int = 0) -> list[int]:
        """Before drafting: the most tokens to draft for each row.

        Args:
            batch: the rows of this step. Read it, do not change it.
            limits: ``[B]`` what is possible.
            num_other_tokens: further tokens that the step computes: pieces of prompts, and drafts of earlier stages.
            stage: which drafter is about to draft, where several are asked in turn; with the first a step begins.

        Returns:
            ``[B]``, each at most its limit.
        """

    def trim(self, batch: Batch, draft: Draft, num_other_tokens: int, stage: int = 0) -> Seq[int]:
        """After drafting: how much of each row's draft to verify, ``[B]``; all of it by default."""
        return draft.lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        """Learn what the step accepted and how long it took. Called once after every step."""

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests. Unknown ids are no error."""


class FixedBudget(BudgetPolicy):
    """The same for every row and step, as in the paper.

    Args:
        num_tokens: per row and step; ``None`` lets the drafter draft as much as it wants.
    """

    def __init__(self, num_tokens: int | None = None) -> None:
        if num_tokens is not None and num_tokens < 0:
            raise ConfigError(f"budget.num_tokens is {num_tokens}; it must be at least 0, or null for no limit")
        self.num_tokens = num_tokens

    def allot(self, batch: Batch, limits: Seq[int], num_other_tokens: int, stage: int = 0) -> list[int]:
        return [limit if self.num_tokens is None else min(limit, self.num_tokens) for limit in limits]


class HeldBudget(BudgetPolicy):
    """Holds every row to the same number of drafted tokens; what is observed goes to the policy that runs later.

    Args:
        inner: the policy that watches; it is also asked, and not heeded.
        num_tokens: for every row and step.
    """

    def __init__(self, inner: BudgetPolicy, num_tokens: int) -> None:
        self._inner = inner
        self._num_tokens = num_tokens

    def allot(self, batch: Batch, limits: Seq[int], num_other_tokens: int, stage: int = 0) -> list[int]:
        self._inner.allot(batch, limits, num_other_tokens, stage)
        return [min(limit, self._num_tokens) for limit in limits]

    def trim(self, batch: Batch, draft: Draft, num_other_tokens: int, stage: int = 0) -> Seq[int]:
        return draft.lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self._inner.observe(outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        self._inner.release(request_ids)
