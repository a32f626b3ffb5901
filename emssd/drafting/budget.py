"""The number of tokens that each row may draft in a step: the `BudgetPolicy` interface, and the simplest policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from emssd.drafting.draft import Draft, Outcome
from emssd.metrics.stats import StepStats
from emssd.sequences import Batch

__all__ = ["BudgetPolicy", "BudgetStep", "DraftedNode", "FixedBudget", "GoesOn"]


class DraftedNode(NamedTuple):
    """A node of the deepest level of a tree that is being drafted, or the newest token of a chain.

    Attributes:
        confidence: how sure the drafter is that it follows its parent, from 0 to 1. It is 1 where tokens are drawn for
            `residual` sampling, as it would tell which one was drawn.
        chance: the product of the confidences on the path to it.
        entropy: in nats, of the drafter's own distribution after its parent.
    """

    confidence: float
    chance: float
    entropy: float


class GoesOn(Protocol):
    """Names the rows that are drafted further, by request id, given the newest nodes of those that may be."""

    def __call__(self, newest: Mapping[str, Seq[DraftedNode]], /) -> Container[str]: ...


class BudgetStep(NamedTuple):
    """A step in which a drafter is about to be asked, or has just drafted.

    Attributes:
        batch: the rows of this step, which can be read only; there may be none.
        limits: ``[B]`` the most tokens that this drafter can draft for each row.
        num_other_tokens: further tokens that the step computes: pieces of prompts, and drafts of earlier drafters.
        stage: which drafter it is, where several are asked in turn.
    """

    batch: Batch
    limits: tuple[int, ...]
    num_other_tokens: int = 0
    stage: int = 0

    @property
    def is_first(self) -> bool:
        """Whether the step begins here: no drafter was asked before this one."""
        return self.stage == 0


class BudgetPolicy(ABC):
    """Spends the tokens of a verification step where they are expected to be accepted. It cannot change the output.

    Attributes:
        max_depth: nodes of trees that are deeper are dropped before `trim`; ``None`` for no limit.
        pause: so many steps draft nothing, and the policy is neither asked nor notified. The engine counts them down.
        summary: in a few words, what it has learnt; it stands below the figures of a run.
    """

    max_depth: int | None = None
    pause: int = 0
    summary: str = ""

    @abstractmethod
    def allot(self, step: BudgetStep) -> Seq[int]:
        """Before a drafter is asked: the most tokens to draft for each row, ``[B]``, each at most its limit."""

    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> Seq[bool]:
        """Between passes of a drafter that runs a model level by level: whether to draft each row further, ``[B]``.

        `newest` are the nodes ``[B]`` of each row's deepest level; none in rows that have ended. Without this method,
        a drafter may draft a chain in one call, and on a GPU its host need not wait for each pass.
        """
        return [True] * len(newest)

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        """After it has drafted: how many of the first nodes of each row to verify, ``[B]``; all of them by default.

        Rows with a `Draft.extra` are verified in full: trimming by token would bias `residual` sampling. Only `allot`,
        `goes_on` and `max_depth`, as it is before drafting, limit them.
        """
        return draft.lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        """Learn what the step accepted and how long it took. Called once after every step."""

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept of these requests: they ended, or were preempted. Unknown ids are no error."""


class FixedBudget(BudgetPolicy):
    """The same for every row and step, as in the paper.

    Args:
        num_tokens: per row and step, in a tree its nodes; ``None`` lets the drafter draft as much as it wants.
        depth: the longest path through a row's tree, so also the longest chain; ``None`` for no limit.
    """

    def __init__(self, num_tokens: int | None = None, depth: int | None = None) -> None:
        self.num_tokens, self.max_depth = num_tokens, depth

    def allot(self, step: BudgetStep) -> Seq[int]:
        return step.limits if self.num_tokens is None else [min(limit, self.num_tokens) for limit in step.limits]
