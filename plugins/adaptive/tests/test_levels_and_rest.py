"""The policy learns what levels of trees take, looks at drafts again, and drafts a little in its first steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, product

import pytest
import torch
from emssd_adaptive import policy as policy_module
from emssd_adaptive.choice import best_limits
from emssd_adaptive.policy import AdaptiveBudget
from emssd_adaptive.stage import StageRecord
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention.trees import depths
from emssd.drafting import BudgetStep, Draft, Outcome
from emssd.metrics.stats import StageStats
from emssd.sequences import Batch, Request, Row
from tests.support.budget_world import step_stats

SHAPE = (-1, 0, -1, 1, 0, 1, 3, 2)  # 4 levels; the first two, four and seven nodes have 2, 3 and 4


def batch_of(names: Seq[str], num_tokens: int = 10) -> Batch:
    return Batch(tuple(Row(Request(name, (1,) * num_tokens, 10**6), num_cached=num_tokens - 1) for name in names))


def draft_of(budget: Seq[int], shape: Seq[int] | None) -> Draft:
    parents = None if shape is None else tuple(parent for asked in budget for parent in shape[:asked])
    return Draft(torch.ones(sum(budget), dtype=torch.int64), (0, *accumulate(budget)), parents)


class Run:
    """Runs a policy, and counts how often a choice is worked out before drafting.

    Args:
        seconds: that each token takes; where it is 1, no draft pays.
        shape: parents of the nodes of trees; ``None`` for chains.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0, shape: Seq[int] | None = None) -> None:
        self.policy, self.seconds, self.shape = AdaptiveBudget(probe_interval=20), seconds, shape
        self.num_choices = 0
        original = policy_module.best_limits

        def counted(*arguments: object) -> list[int]:
            self.num_choices += 1
            return original(*arguments)  # type: ignore[arg-type]  # as they came

        monkeypatch.setattr(policy_module, "best_limits", counted)

    def step(self, names: Seq[str], limit: int = 4, *, accepts: bool = False) -> list[int]:
        """One step. Returns what was allotted."""
        batch = batch_of(names)
        step = BudgetStep(batch, (limit,) * len(batch))
        budget = list(self.policy.allot(step))
        kept = list(self.policy.trim(step, draft := draft_of(budget, self.shape)))
        accepted = tuple(range(number if accepts else 0) for number in kept)
        stats = step_stats(budget, kept, [1] * len(kept), 0.1 + self.seconds * (len(batch) + sum(kept)))
        self.policy.observe(Outcome(batch, draft.cut(kept), accepted, ()), stats)
        return budget

    def choices(self, names: Seq[str], num_steps: int = 1) -> list[int]:
        """In how many of so many steps each step's choice was worked out: 1 or 0 by step."""
        found = []
        for _ in range(num_steps):
            before = self.num_choices
            self.step(names)
            found.append(self.num_choices - before)
        return found

    def idle(self, names: Seq[str]) -> Run:
        """Steps until nothing is drafted, and a choice has just been worked out."""
        for _ in range(40):
            self.step(names)
        for _ in range(40):
            before = self.num_choices
            if not any(self.step(names)) and self.num_choices > before:
                return self
        pytest.fail("drafting goes on, or choices do not")


def test_where_nothing_pays_the_choice_is_worked_out_again_after_eight_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch).idle("ab")
    run.policy._stages[0].num_idle = -1000  # no probe
    assert run.choices("ab", 18) == ([0] * 8 + [1]) * 2


def test_what_a_probe_tells_is_looked_at_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch).idle("ab")
    record = run.policy._stages[0]
    record.num_idle = 10**4  # a probe is due
    before = run.num_choices
    assert any(run.step("ab"))
    assert run.num_choices == before, "a probe does not ask whether it pays"
    assert run.choices("ab", 2) == [1, 0]


def test_what_a_step_without_drafts_tells_is_looked_at_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, seconds=0.0)
    for _ in range(20):
        assert any(run.step("ab", accepts=True)) or run.policy._is_control or run.policy._time.num_observed < 10
    run.policy._stages[0].rest_unless([0, 0], BudgetStep(batch_of("ab"), (4, 4)))
    run.policy._num_drafting = 10**4  # a control is due
    assert not any(run.step("ab"))
    assert any(run.step("ab", accepts=True)), "it drafts again, and does not rest"


# In tenths: equal worths of several rows are the rule, not the exception.
FALLING = st.lists(st.integers(0, 10).map(lambda tenths: tenths / 10), max_size=4).map(
    lambda row: sorted(row, reverse=True)
)


@given(
    worths=st.lists(FALLING, min_size=1, max_size=3),
    rises=st.lists(st.floats(0, 1), min_size=12, max_size=12).map(sorted),
    seconds=st.floats(0.1, 5),
    per_level=st.floats(0, 2),
    deepest=st.integers(1, 4),
)
def test_of_trees_that_are_only_so_deep_the_best_of_all_limits_are_taken(
    worths: list[list[float]], rises: list[float], seconds: float, per_level: float, deepest: int
) -> None:
    def rate(lengths: Seq[int]) -> float:
        gain = len(worths) + sum(sum(row[:length]) for row, length in zip(worths, lengths, strict=True))
        return gain / (seconds + sum(rises[: sum(lengths)]) + per_level * min(max(lengths), deepest))

    levels = [(most, per_level * most) for most in range(1, deepest)] + [(4, per_level * deepest)]
    found = best_limits(worths, len(worths), seconds, rises, levels)
    assert all(0 <= length <= len(row) for length, row in zip(found, worths, strict=True))
    assert rate(found) >= max(map(rate, product(*(range(len(row) + 1) for row in worths)))) * (1 - 1e-9)


def observe_draft(record: StageRecord, budget: Seq[int], shape: Seq[int] | None, seconds: float = 1.0) -> None:
    batch = batch_of("abc"[: len(budget)])
    record.worths_of(batch.request_ids, draft := draft_of(budget, shape))
    outcome = Outcome(batch, draft, ((),) * len(budget), ())
    lengths = dict.fromkeys(batch.request_ids, 0)
    record.observe(outcome, StageStats(tuple(budget), tuple(budget), seconds), lengths)


def test_levels_of_trees_are_those_of_the_deepest_and_perhaps_more_for_more_nodes_than_ever() -> None:
    record = StageRecord(16, 32)
    assert [record.levels(number) for number in (0, 1, 8)] == [0, 1, 8], "nothing is known: it may be a chain"
    observe_draft(record, [4, 2], SHAPE)
    assert max(depths(SHAPE[:4])) == 3
    assert [record.levels(number) for number in (1, 2, 3, 4, 5, 8)] == [1, 2, 3, 3, 4, 7]
    observe_draft(record, [2, 2], SHAPE)
    assert record.levels(8) == 7, "a small limit tells nothing new"
    observe_draft(record, [0, 8], SHAPE)
    assert [record.levels(number) for number in (1, 3, 4, 5, 8)] == [1, 3, 4, 4, 4]
    observe_draft(record, [5], range(-1, 4))
    assert record.levels(8) == 5, "a tree may be deeper than those before"


def test_a_row_that_drafts_nothing_says_nothing_about_levels_and_chains_have_one_for_each_node() -> None:
    record = StageRecord(16, 32)
    batch = batch_of("a")
    outcome = Outcome(batch, draft_of([0], SHAPE), ((),), ())
    record.observe(outcome, StageStats((8,), (0,), 1.0), {"a": 0})
    assert record.levels(8) == 8
    record.worths_of("ab", draft := draft_of([0, 2], SHAPE))
    outcome = Outcome(batch_of("ab"), draft, ((), ()), ())
    record.observe(outcome, StageStats((8, 2), (0, 2), 1.0), {"a": 0, "b": 0})
    assert record.levels(8) == 8, "of eight nodes nothing was seen"
    record = StageRecord(16, 32)
    for length in (3, 5):
        observe_draft(record, [length], None)
    assert [record.levels(number) for number in (2, 5, 7, 99)] == [2, 5, 7, 99]


def test_seconds_of_drafting_are_learnt_by_levels_not_by_nodes() -> None:
    record = StageRecord(16, 32)
    shape = (-1, 0, 1, 2, -1, 0, 1, 2)
    for _ in range(60):
        for number in (8, 3, 2, 7):
            observe_draft(record, [number], shape, seconds=0.5 * max(depths(shape[:number])))
    for number in (8, 3, 2):
        found = record.seconds_per_level * record.levels(number) + record.seconds_per_token * number
        assert found == pytest.approx(0.5 * max(depths(shape[:number])), rel=0.05)


def test_a_tree_pays_whose_levels_are_paid_for_by_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node does not pay for its level; eight nodes in four levels do."""
    run = Run(monkeypatch, seconds=0.0, shape=SHAPE)
    run.policy._time.observe(2, 100, 1.0)
    run.policy._time._verify.num_seen = 1000  # no trials
    record = StageRecord(16, 32)
    run.policy._stages = [record]
    observe_draft(record, [8], SHAPE)
    monkeypatch.setattr(record, "worths_before", lambda ids, limits: [[0.3] * limit for limit in limits])
    monkeypatch.setattr(StageRecord, "seconds_per_level", 0.5)
    monkeypatch.setattr(StageRecord, "seconds_per_token", 0.0)
    step = BudgetStep(batch_of("a"), (8,))
    assert run.policy.allot(step) == [8], "3.4 tokens in 3 seconds, not 1 in 1"
    record._most_nodes = 0  # as if each node might have a level of its own
    assert run.policy.allot(step) == [0]


@pytest.mark.parametrize("num_rows", [1, 8, 100])
def test_the_first_steps_draft_all_once_and_few_tokens_otherwise(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, shape=range(-1, 15))
    run.policy._time.observe(20, 100, 20.0)  # the prompts
    names = [str(row) for row in range(num_rows)]
    budgets = [run.step(names, 16) for _ in range(len(policy_module._TRIALS) - 1)]
    assert budgets[-1] == [16] * num_rows
    assert all(sum(budget) <= 64 for budget in budgets[:-1])
    assert {max(budget) for budget in budgets[:-1]} == {0, 2, 4}, "a curve has several points"
    assert run.num_choices == 0
    run.step(names, 16)
    assert run.num_choices == 1


def test_drafts_that_tell_their_worth_are_soon_known_until_eight_were_in_vain() -> None:
    record, batch = StageRecord(16, 32), batch_of("a")

    def draft_once(kept: int) -> None:
        record.worths_of(batch.request_ids, draft := Draft.from_chains([[1, 1]], [[0.5, 0.5]]))
        outcome = Outcome(batch, draft.cut([kept]), ((),), ())
        record.observe(outcome, StageStats((2,), (kept,), 0.01), {"a": 0})

    assert not record.tells_soon(1.0), "no draft was seen"
    draft_once(2)
    assert record.tells_soon(0.02)
    assert not record.tells_soon(0.005), "that is less than drafting takes"
    for _ in range(7):
        draft_once(0)
    assert record.tells_soon(0.02)
    draft_once(0)
    assert not record.tells_soon(0.02)
    draft_once(1)
    assert record.tells_soon(0.02)


def test_where_drafts_tell_soon_what_they_are_worth_all_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch).idle("ab")
    run.policy._stages[0].wake()
    monkeypatch.setattr(StageRecord, "tells_soon", lambda record, seconds: 0 < seconds < 0.1)
    assert run.step("ab") == [4, 4], "and `trim` keeps what pays"
