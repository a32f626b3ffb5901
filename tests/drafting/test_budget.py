"""Budgets of each row: fixed budgets, scripted ones, and drafts that are cut after they were made."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, ScriptedBudget
from emssd_testing.models import tiny_model

from emssd import Engine
from emssd.decoding.warmup import HeldBudget
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter, Outcome
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.errors import PluginError
from emssd.hooks.builtin import FixedBudgetConfig
from emssd.metrics.stats import StepStats
from emssd.sequences import Batch, Request, Row
from tests.support.oracle import build
from tests.support.tiers import looped
from tests.support.trees import chains_of

BATCH = Batch(tuple(Row(Request(name, (1,), 9)) for name in "abc"))


@looped(
    ("num_tokens", "expected"), [(None, [7, 0, 3]), (0, [0, 0, 0]), (3, [3, 0, 3]), (5, [5, 0, 3]), (99, [7, 0, 3])]
)
def test_a_fixed_budget_is_the_same_for_all_within_their_limits(num_tokens: int | None, expected: list[int]) -> None:
    assert list(FixedBudget(num_tokens).allot(BudgetStep(BATCH, (7, 0, 3), 5))) == expected


class Tree(Drafter):
    """Drafts the same tree for each row, as far as its budget goes, and remembers that budget."""

    num_speculative_tokens, drafts_trees = 7, True
    nodes: ClassVar[list[tuple[int, int]]] = [(1, -1), (2, 0), (3, -1), (4, 1), (5, 2), (6, 3), (7, 4)]

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.budget = list(budget)
        return Draft.from_trees([self.nodes[:limit] for limit in budget])


def test_a_drafter_that_wants_endless_trees_is_given_4096_nodes() -> None:
    drafter = Tree()
    drafter.num_speculative_tokens = 10**9
    stages = DraftStages([CheckedDrafter(drafter, None, 10)], FixedBudget())
    stages.propose(BATCH, [10**9] * len(BATCH), 0)
    assert drafter.budget == [4096] * len(BATCH)


@looped(
    ("num_tokens", "depth", "tokens"),
    [
        (None, None, [1, 2, 3, 4, 5, 6, 7]),
        (4, None, [1, 2, 3, 4]),
        (None, 2, [1, 2, 3, 5]),
        (None, 1, [1, 3]),
        (4, 2, [1, 2, 3]),
        (None, 0, []),
    ],
)
def test_a_fixed_budget_limits_nodes_and_depth_of_a_tree(
    num_tokens: int | None, depth: int | None, tokens: list[int]
) -> None:
    drafter = Tree()
    stages = DraftStages([CheckedDrafter(drafter, None, 9)], FixedBudget(num_tokens, depth))
    draft = stages.propose(BATCH, [7, 7, 7], 0)
    assert drafter.budget == [min(7, 7 if num_tokens is None else num_tokens)] * 3
    assert chains_of(draft) == [tokens] * 3
    for row in range(3):
        parents = [tokens[parent] if parent >= 0 else -1 for parent in draft.tree(row)]
        assert parents == [
            Tree.nodes[Tree.nodes[token - 1][1]][0] if Tree.nodes[token - 1][1] >= 0 else -1 for token in tokens
        ]
    assert stages.stats[0].drafted == (len(tokens),) * 3


def test_a_policy_that_is_held_sees_what_was_drafted_and_is_not_heeded() -> None:
    class Sees(ScriptedBudget):
        def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
            seen.append(draft.lengths)
            return super().trim(step, draft)

    seen: list[list[int]] = []
    stages = DraftStages([CheckedDrafter(Tree(), None, 9)], HeldBudget(Sees([(1, 1)]), 3))
    assert stages.propose(BATCH, [7, 7, 2], 0).lengths == [3, 3, 2]
    assert seen == [[3, 3, 2]]
    assert HeldBudget(FixedBudget(depth=2), 3).max_depth == 2


def test_a_policy_is_chosen_by_name_by_config_or_given() -> None:
    model = tiny_model()
    assert isinstance(Engine.from_model(model, drafter="none", budget="fixed").drafting.policy, FixedBudget)
    by_config = Engine.from_model(model, drafter="none", budget=FixedBudgetConfig(num_tokens=2)).drafting.policy
    assert isinstance(by_config, FixedBudget)
    assert by_config.num_tokens == 2
    policy = ScriptedBudget([(1, 1)])
    assert Engine.from_model(model, drafter="none", budget=policy).drafting.policy is policy
    with pytest.raises(PluginError, match="unknown budget 'lavish'; choose one of adaptive, fixed"):
        Engine.from_model(model, budget="lavish")


@looped(
    ("script", "num_steps"),
    [
        ([(5, 5)], 2),  # 12 tokens, of which each step gives one of its own
        ([(5, 2)], 4),
        ([(2, 5)], 4),
        ([(0, 5)], 12),
        ([(5, 0)], 12),
        ([(5, 5), (0, 0)], 3),
    ],
)
def test_what_is_allotted_is_drafted_and_what_is_trimmed_is_not_verified(
    script: list[tuple[int, int]], num_steps: int, oracle: Any, make_ragged: Any
) -> None:
    drafter: Any = PerfectDrafter(11, 5, oracle.references([[1, 2, 3]], 12))
    drafter.propose, drafter.observe = Mock(wraps=drafter.propose), Mock(wraps=drafter.observe)
    engine = build(oracle, make_ragged, drafter, budget=ScriptedBudget(script))
    (done,) = engine.generate([[1, 2, 3]], 12)
    assert done.token_ids == oracle.reference([1, 2, 3], 12)
    assert done.num_steps == num_steps
    assert done.num_accepted == done.num_drafted == 12 - num_steps
    observed = [call.args[0].draft.lengths[0] for call in drafter.observe.call_args_list]
    assert max(observed) <= min(script[0]), "a drafter hears of what was verified, not of what it drafted"
    assert len(observed) == num_steps
    assert all(any(call.args[1]) for call in drafter.propose.call_args_list), "it is not asked for nothing"


def test_a_pause_of_so_many_steps_drafts_nothing_and_ends(oracle: Any, make_ragged: Any) -> None:
    class Pauses(ScriptedBudget):
        def observe(self, outcome: Outcome, stats: StepStats) -> None:
            seen.append(stats.num_new_tokens)
            self.pause = 3

    seen: list[int] = []
    drafter: Any = PerfectDrafter(11, 2, oracle.references([[1, 2, 3]], 18))
    drafter.observe = Mock(wraps=drafter.observe)
    engine = build(oracle, make_ragged, drafter, budget=Pauses([(2, 2)]))
    (done,) = engine.generate([[1, 2, 3]], 18)
    assert done.token_ids == oracle.reference([1, 2, 3], 18)
    assert seen == [3, 3, 3], "each followed by three steps of a token"
    assert done.num_steps == drafter.observe.call_count == 12, "drafters hear of every step"


def test_a_pause_that_is_no_number_is_blamed_on_the_policy() -> None:
    policy = ScriptedBudget([(1, 1)])
    policy.pause = "long"  # type: ignore[assignment]
    with pytest.raises(PluginError, match="budget policy ScriptedBudget failed in pause"):
        DraftStages([CheckedDrafter(Tree(), None, 9)], policy).propose(BATCH, [7, 7, 2], 0)


def test_what_a_grammar_forces_is_drafted_in_a_pause_too() -> None:
    policy = ScriptedBudget([(1, 1)])
    policy.pause = 3
    stages = DraftStages([CheckedDrafter(Tree(), None, 9)], policy)
    stages.force_tokens(9)
    stages.propose(BATCH, [7, 7, 2], 0)
    assert len(stages.stats) == 2
    assert policy.pause == 3
    assert any(stages.stats[1].budget)


def test_the_time_in_which_a_policy_learns_is_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, late = time.perf_counter, [0.0]
    monkeypatch.setattr("emssd.decoding.outcome.time.perf_counter", lambda: clock() + late[0])

    class Ponders(FixedBudget):
        def observe(self, outcome: Outcome, stats: StepStats) -> None:
            late[0] += 1000.0

    model = tiny_model()
    engine = Engine.from_model(model, drafter="none", budget=Ponders())
    engine.generate([[3, 4, 5]], 6, ignore_eos=True)
    assert late == [0.0], "nobody is asked where no drafter drafts, so nobody is notified"
    engine = Engine.from_model(model, drafter="suffix", budget=Ponders())
    engine.generate([[3, 4, 5]], 6, ignore_eos=True)
    seconds, num_steps = engine.report.seconds, engine.report.num_steps
    assert 1000.0 * num_steps <= seconds["schedule"] <= sum(seconds.values()) < 1000.0 * (num_steps + 1)


class Broken(BudgetPolicy):
    """Gives what it is told to give."""

    def __init__(self, allotted: Any = None, trimmed: Any = None) -> None:
        self.allotted, self.trimmed = allotted, trimmed

    def allot(self, step: BudgetStep) -> list[int]:
        return list(step.limits) if self.allotted is None else self.allotted(step.limits)

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        return draft.lengths if self.trimmed is None else self.trimmed(draft.lengths)


@looped("where", ["allotted", "trimmed"])
@looped(
    ("fault", "message"),
    [
        (lambda limits: [limit + 1 for limit in limits], "broke its interface"),
        (lambda limits: [-1 for _ in limits], "broke its interface"),
        (lambda limits: limits[1:], "broke its interface"),
        (lambda limits: [0, *limits], "broke its interface"),
        (lambda limits: 1 / 0, "failed in"),
    ],
)
def test_a_policy_that_breaks_its_interface_is_named(
    fault: Any, message: str, where: str, oracle: Any, make_ragged: Any, prompts: list[list[int]]
) -> None:
    engine = build(oracle, make_ragged, RandomDrafter(11, 3), budget=Broken(**{where: fault}))
    with pytest.raises(PluginError, match=f"budget policy Broken {message}"):
        engine.generate(prompts, 6)
    assert engine.runner.usage.held == 0
