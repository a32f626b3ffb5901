"""First-party budget policies pass the suite of budget policies; planted faults do not, and are named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from emssd_testing import BudgetPolicyConformance

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd.sequences import Row
from plugins.testing.tests.conftest import Verdicts, but, fails, suite

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
        wanted = [1 + self.accepted.get(row.request_id, 1) for row in step.batch]
        return [min(limit, length) for limit, length in zip(step.limits, wanted, strict=True)]

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        for row, nodes in zip(outcome.batch, outcome.accepted, strict=True):
            self.accepted[row.request_id] = len(nodes)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.accepted.pop(request_id, None)


class CountsOnPrefixes(Good):
    """Takes the number of accepted nodes for the last of them."""

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        super().observe(outcome, stats)
        assert all(not nodes or nodes[-1] == len(nodes) - 1 for nodes in outcome.accepted)


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


class ChangesTheEngine(Good):
    """No other rule says what it may do with rows that it keeps."""

    rows: tuple[Any, ...] = ()

    def allot(self, step: BudgetStep) -> list[int]:
        self.rows = tuple(step.batch)
        return super().allot(step)

    def release(self, request_ids: Iterable[str]) -> None:
        super().release(request_ids)
        _edit(self.rows)


def _edit(rows: Iterable[Row]) -> None:
    for row in rows:
        list.__setitem__(row.tokens, -1, row.tokens[-1] + 1)  # as far out of reach as Python can put it


def _edit_draft(self: Good, step: BudgetStep, draft: Draft) -> list[int]:
    draft.token_ids.add_(1)
    return draft.lengths


SHARED = Good()

FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "builds the same again": ("budget.build", lambda: SHARED),
    "builds no policy": ("budget.build", lambda: 5),
    "gives more than the limit": (
        "budget.allot", but(Good, allot=lambda self, step: [limit + 1 for limit in step.limits])
    ),
    "gives fractions": ("budget.allot", but(Good, allot=lambda self, step: [limit / 2 for limit in step.limits])),
    "trims to truth values": (
        "budget.trim", but(Good, trim=lambda self, step, draft: [length > 0 for length in draft.lengths])
    ),
    "trims below zero": (
        "budget.trim", but(Good, trim=lambda self, step, draft: [length - 1 for length in draft.lengths])
    ),
    "answers once for all rows": (
        "budget.goes_on", but(Good, goes_on=lambda self, step, newest: [any(map(len, newest))])
    ),
    "fails to end drafts": ("budget.raises", but(Good, goes_on=fails)),
    "edits tokens": ("budget.batch", but(Good, observe=lambda self, outcome, stats: _edit(outcome.batch))),
    "edits drafts": ("budget.batch", but(Good, trim=_edit_draft)),
    "sets the default dtype": (
        "budget.process", but(Good, observe=lambda self, outcome, stats: torch.set_default_dtype(torch.float16))
    ),
    "needs rows": ("budget.limits", but(Good, allot=lambda self, step: [min(step.limits) for _ in step.limits or [0]])),
    "needs one drafter": (
        "budget.limits", but(Good, allot=lambda self, step: Good.allot(self, step) if step.is_first else fails())
    ),
    "needs chains": (
        "budget.trees", but(Good, trim=lambda self, step, draft: fails() if draft.parents else draft.lengths)
    ),
    "takes accepted nodes for a prefix": ("budget.trees", CountsOnPrefixes),
    "draws": (
        "budget.deterministic", but(Good, allot=lambda self, step: [random.randint(0, limit) for limit in step.limits])
    ),
    "forgets to release": ("budget.release", but(Good, release=lambda self, request_ids: None)),
    "misses unknown ids": ("budget.release", MissesUnknownIds),
    "keeps what is in the middle": ("budget.preemption", KeepsWhatIsInTheMiddle),
    "crashes": ("budget.raises", but(Good, observe=lambda self, outcome, stats: exit(0))),
    "changes rows when it releases": ("budget.lossless", ChangesTheEngine),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_rule_is_named(fault: str, verdicts: Verdicts) -> None:
    rule, make = FAULTS[fault]
    assert set((results := verdicts(suite("budget", make), rule)).values()) == {rule}, results


def test_a_good_one_breaks_no_rule(verdicts: Verdicts) -> None:
    assert verdicts(suite("budget", Good)) == {}
