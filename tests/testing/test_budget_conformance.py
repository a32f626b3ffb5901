"""First-party budget policies pass the suite of budget policies; planted faults do not, and are named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode, Outcome, StepStats
from emssd.testing import BudgetPolicyConformance
from emssd.testing.conformance.suite import Suite
from tests.testing.conftest import Verdicts, planted

pytestmark = pytest.mark.costly("holds a plugin to every rule")


class TestAdaptive(BudgetPolicyConformance):
    plugin = "adaptive"
    num_examples = 6


class TestFixed(BudgetPolicyConformance):
    plugin = "fixed"
    options = {"num_tokens": 2}  # noqa: RUF012
    num_examples = 5


class Good(BudgetPolicy):
    """The policy that the faults are planted in: one more than a row had accepted in its last step."""

    def __init__(self) -> None:
        self.accepted: dict[str, int] = {}

    def allot(self, step: BudgetStep) -> list[int]:
        known = [1 + self.accepted.get(row.request_id, 1) for row in step.batch]
        return [min(limit, length) for limit, length in zip(step.limits, known, strict=True)]

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        for row, nodes in zip(outcome.batch, outcome.accepted, strict=True):
            self.accepted[row.request_id] = len(nodes)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.accepted.pop(request_id, None)


class OverTheLimit(Good):
    def allot(self, step: BudgetStep) -> list[int]:
        return [limit + 1 for limit in step.limits]


class Fractions(Good):
    def allot(self, step: BudgetStep) -> list[int]:
        return [limit / 2 for limit in step.limits]  # type: ignore[misc]  # that is the fault


class Booleans(Good):
    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        return [length > 0 for length in draft.lengths]


class TrimsBelowZero(Good):
    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        return [length - 1 for length in draft.lengths]


class AnswersOnce(Good):
    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> Seq[bool]:
        return [any(map(len, newest))]


class FailsToEnd(Good):
    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> Seq[bool]:
        return [all(node.surprise > 0.1 for node in nodes) for nodes in newest]  # type: ignore[attr-defined]  # the fault


class EditsTokens(Good):
    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        super().observe(outcome, stats)
        for row in outcome.batch:
            list.__setitem__(row.tokens, -1, row.tokens[-1] + 1)  # as far out of reach as Python can put it


class EditsDrafts(Good):
    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        draft.token_ids.add_(1)
        return draft.lengths


class NeedsRows(Good):
    def allot(self, step: BudgetStep) -> list[int]:
        return [min(limit, max(step.limits)) for limit in step.limits] or [min(step.limits)]


class NeedsOneStage(Good):
    def allot(self, step: BudgetStep) -> list[int]:
        assert step.is_first
        return super().allot(step)


class NeedsChains(Good):
    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        assert draft.parents is None
        return draft.lengths


class CountsOnPrefixes(Good):
    """Takes the number of accepted nodes for the last of them."""

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        super().observe(outcome, stats)
        assert all(not nodes or nodes[-1] == len(nodes) - 1 for nodes in outcome.accepted)


class Draws(Good):
    def allot(self, step: BudgetStep) -> list[int]:
        return [random.randint(0, limit) for limit in step.limits]


class ForgetsToRelease(Good):
    def release(self, request_ids: Iterable[str]) -> None:
        pass


class MissesUnknownIds(Good):
    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self.accepted[request_id]


class KeepsWhatIsInTheMiddle(Good):
    """Forgets only requests that reached their limit."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: set[str] = set()

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        super().observe(outcome, stats)
        self.ended |= {row.request_id for row in outcome.batch if row.finish_reason is not None}

    def release(self, request_ids: Iterable[str]) -> None:
        super().release([name for name in request_ids if name in self.ended])


class Crashes(Good):
    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        raise SystemExit(0)


class ChangesTheEngine(Good):
    """No other rule says what it may do with rows that it keeps."""

    rows: tuple[Any, ...] = ()

    def allot(self, step: BudgetStep) -> list[int]:
        self.rows = tuple(step.batch)
        return super().allot(step)

    def release(self, request_ids: Iterable[str]) -> None:
        super().release(request_ids)
        for row in self.rows:
            list.__setitem__(row.tokens, -1, 0)


SHARED = Good()

FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "builds the same again": ("budget.build", lambda: SHARED),
    "builds no policy": ("budget.build", lambda: 5),
    "gives more than the limit": ("budget.allot", OverTheLimit),
    "gives fractions": ("budget.allot", Fractions),
    "trims to truth values": ("budget.trim", Booleans),
    "trims below zero": ("budget.trim", TrimsBelowZero),
    "answers once for all rows": ("budget.goes_on", AnswersOnce),
    "fails to end drafts": ("budget.raises", FailsToEnd),
    "edits tokens": ("budget.batch", EditsTokens),
    "edits drafts": ("budget.batch", EditsDrafts),
    "needs rows": ("budget.limits", NeedsRows),
    "needs one drafter": ("budget.limits", NeedsOneStage),
    "needs chains": ("budget.trees", NeedsChains),
    "takes accepted nodes for a prefix": ("budget.trees", CountsOnPrefixes),
    "draws": ("budget.deterministic", Draws),
    "forgets to release": ("budget.release", ForgetsToRelease),
    "misses unknown ids": ("budget.release", MissesUnknownIds),
    "keeps what is in the middle": ("budget.preemption", KeepsWhatIsInTheMiddle),
    "crashes": ("budget.raises", Crashes),
    "changes rows when it releases": ("budget.lossless", ChangesTheEngine),
}


def suite(make: Callable[[], Any], **attributes: Any) -> type[Suite]:
    return planted(BudgetPolicyConformance, "make_policy", lambda self: make(), **attributes)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_rule_is_named(fault: str, verdicts: Verdicts) -> None:
    rule, make = FAULTS[fault]
    assert set((found := verdicts(suite(make), rule)).values()) == {rule}, found


def test_a_good_one_breaks_no_rule_and_one_that_says_that_it_draws_is_not_compared(verdicts: Verdicts) -> None:
    assert verdicts(suite(Good)) == {}
    found = verdicts(suite(Draws, decides_at_random=True))
    assert set(found.values()) == {"skipped: it decides at random, and its decisions are not compared"}
    assert len(found) == 3
