"""Each row is served by the first drafter that has something, and every drafter hears what became of its own rows."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from unittest.mock import Mock, call

import pytest
from emssd_cascade import CascadeConfig, emssd_drafters
from emssd_testing.drafters import ScriptedBudget

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter, DrafterContext, Outcome
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.errors import PluginWarning
from emssd.sequences import Batch, Request, Row
from tests.support.told_drafter import Told
from tests.support.trees import chains_of

IDS = ([0] * 5,) * 3  # what a target chose, of no interest here


def told(token: int, *lengths: int, most: int = 4) -> Told:
    """A drafter of chains of its own token, of such lengths row by row."""
    return Told(Draft.from_chains([token] * length for length in lengths), most)


def rows(*names: str) -> Batch:
    return Batch(tuple(Row(Request(name, (1, 2, 3), 50)) for name in names))


def stages(*drafters: Drafter, policy: BudgetPolicy | None = None) -> DraftStages:
    checked = [CheckedDrafter(drafter, None, 11, on_error="fail") for drafter in drafters]
    return DraftStages(checked, policy or FixedBudget())


def test_each_row_is_served_by_the_first_drafter_that_has_something() -> None:
    first, second = told(1, 2, 0, 0, 9, 0), told(2, 4, 3, 0, 0, 0, most=6)
    third = told(3, 1, 1, 1, 1, 0)
    cascade = stages(first, second, third)
    assert cascade.num_speculative_tokens == 6
    draft = cascade.propose(rows("a", "b", "c", "d", "e"), [6, 6, 6, 6, 0], 0)
    assert chains_of(draft) == [[1, 1], [2, 2, 2], [3], [1, 1, 1, 1], []]
    assert first.budgets == [[4, 4, 4, 4, 0]]
    assert second.budgets == [[0, 6, 6, 0, 0]]
    assert third.budgets == [[0, 0, 4, 0, 0]]


def test_each_drafter_hears_of_its_own_rows_and_that_nothing_was_drafted_for_others() -> None:
    first, second = told(1, 3, 0, 0), told(2, 0, 4, 0)
    cascade = stages(first, second, policy=ScriptedBudget([(4, 2), (4, 3), (4, 0)]))
    batch = rows("a", "b", "c")
    draft = cascade.propose(batch, [4, 4, 4], 0)
    assert chains_of(draft) == [[1, 1], [2, 2, 2], []]
    cascade.observe(Outcome(batch, draft, (range(2), range(1), range(0)), IDS))
    (ours,), (theirs,) = first.outcomes, second.outcomes
    assert ours.batch == theirs.batch == batch
    assert chains_of(ours.draft) == [[1, 1], [], []]
    assert [len(nodes) for nodes in ours.accepted] == [2, 0, 0]
    assert chains_of(theirs.draft) == [[], [2, 2, 2], []]
    assert [len(nodes) for nodes in theirs.accepted] == [0, 1, 0]


def test_a_row_whose_draft_is_trimmed_away_is_offered_to_the_next_drafter() -> None:
    first, second = told(1, 3, 3), told(2, 3, 3)
    cascade = stages(first, second, policy=ScriptedBudget([(4, 0), (4, 3), (4, 2), (4, 2)]))
    batch = rows("a", "b")
    draft = cascade.propose(batch, [4, 4], 0)
    assert chains_of(draft) == [[2, 2], [1, 1, 1]]
    cascade.observe(Outcome(batch, draft, (range(1), range(2)), IDS[:2]))
    assert chains_of(first.outcomes[0].draft) == [[], [1, 1, 1]]
    assert chains_of(second.outcomes[0].draft) == [[2, 2], []]


def test_who_served_a_row_is_forgotten_with_the_step() -> None:
    first, second = told(1, 2), told(2, 3)
    cascade = stages(first, second)
    batch = rows("a")
    cascade.observe(Outcome(batch, cascade.propose(batch, [4], 0), (range(1),), IDS[:1]))
    first.draft = Draft.empty(1)
    cascade.observe(Outcome(batch, cascade.propose(batch, [4], 0), (range(3),), IDS[:1]))
    cascade.observe(Outcome(batch, cascade.propose(batch, [0], 0), (range(0),), IDS[:1]))
    assert [outcome.draft.lengths for outcome in first.outcomes] == [[2], [0], [0]]
    assert [outcome.draft.lengths for outcome in second.outcomes] == [[0], [3], [0]]


class Counting(FixedBudget):
    """Remembers what it is told of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int, list[int]]] = []

    def allot(self, step: BudgetStep) -> list[int]:
        self.calls.append(("allot", step.stage, step.num_other_tokens, list(step.limits)))
        return super().allot(step)

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        self.calls.append(("trim", step.stage, step.num_other_tokens, draft.lengths))
        return super().trim(step, draft)


def test_the_policy_decides_before_and_behind_each_stage_and_knows_what_earlier_ones_drafted() -> None:
    policy = Counting()
    cascade = stages(told(1, 2, 0), told(2, 0, 3, most=6), policy=policy)
    cascade.propose(rows("a", "b"), [6, 5], 7)
    assert policy.calls == [
        ("allot", 0, 7, [4, 4]),
        ("trim", 0, 7, [2, 0]),
        ("allot", 1, 7 + 2, [0, 5]),
        ("trim", 1, 7 + 2, [0, 3]),
    ]
    assert [(stage.budget, stage.drafted) for stage in cascade.stats] == [((4, 4), (2, 0)), ((0, 5), (0, 3))]


class Raising(Told):
    """Fails when it is asked, and when it is to forget."""

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        raise ZeroDivisionError("of its own")

    def release(self, request_ids: Iterable[str]) -> None:
        super().release(request_ids)
        raise ZeroDivisionError("of its own")


def test_a_drafter_that_fails_takes_no_other_with_it() -> None:
    good = told(2, 3)
    bad = Raising(Draft.empty(1))
    cascade = DraftStages([CheckedDrafter(bad, None, 11), CheckedDrafter(good, None, 11)], FixedBudget())
    batch = rows("a")
    with pytest.warns(PluginWarning, match="drafter Raising failed in propose"):
        assert chains_of(cascade.propose(batch, [4], 0)) == [[2, 2, 2]]
    assert chains_of(cascade.propose(batch, [4], 0)) == [[2, 2, 2]]
    assert cascade.num_speculative_tokens == 4
    cascade.release(["a"])
    assert bad.released == good.released == ["a"]


def test_drafters_are_made_in_order_each_with_its_own_options() -> None:
    make_drafter = Mock(side_effect=lambda *_: told(1))
    context = DrafterContext(11, None, lambda path: pytest.fail("a cascade loads no model itself"), make_drafter)
    (spec,) = emssd_drafters()
    drafters = spec.build(CascadeConfig(["x", "y"], {"y": {"length": 3}}), context)
    assert [type(drafter) for drafter in drafters] == [Told, Told]
    assert make_drafter.call_args_list == [call("x", {}), call("y", {"length": 3})]
