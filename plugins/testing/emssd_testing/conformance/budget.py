"""`BudgetPolicyConformance`: the tests that every budget policy must pass, to be inherited by its author."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from functools import partial
from itertools import product

import pytest
from hypothesis import strategies as st

from emssd.drafting import BudgetPolicy
from emssd.sequences import Request, Row
from emssd_testing.conformance.rules import broken, renamed
from emssd_testing.conformance.scripted import AGREEABLE, Decision, Life
from emssd_testing.conformance.setting import decode, runs
from emssd_testing.conformance.suite import NEW_NAME, ScriptedSuite
from emssd_testing.conformance.watch import Decided, WatchedPolicy
from emssd_testing.conformance.worlds import DRAFTS, Drafts, PolicyWorld
from emssd_testing.oracle import DenseBackend
from emssd_testing.strategies import drafters

__all__ = ["BudgetPolicyConformance"]

_rule = pytest.mark.emssd_rule
_drafts = st.sampled_from(DRAFTS)
_STINGY = Decision(limit=9, keep=9, agree=0, token=1)
_OTHERS = [Life(Request("b", (1, 3, 2), 30), (AGREEABLE, _STINGY)), Life(Request("c", (2,), 9), (AGREEABLE,), 2)]


class BudgetPolicyConformance(ScriptedSuite):
    """Tests of a budget policy. Inherit, and say which::

        class TestMine(BudgetPolicyConformance):
            plugin = "mine"                            # one that is installed

        class TestAnother(BudgetPolicyConformance):    # or one that is not
            def make_policy(self):
                return AnotherPolicy()

    Each failure names the rule that was broken; docs/reference/budget_rules.md explains them.
    """

    kind = "budget"

    def make_policy(self) -> BudgetPolicy:
        """A new policy; called many times."""
        spec, config = self.spec(), self.make_config()
        made: BudgetPolicy = spec.build(config)
        return made

    @_rule("budget.build")
    def test_it_is_built(self) -> None:
        """Twice, so that nothing is shared."""
        self._policy()

    @_rule("budget.allot", "budget.goes_on", "budget.trim", "budget.batch", "budget.process", "budget.raises")
    def test_every_call_keeps_to_the_interface(self) -> None:
        """Any requests, limits, drafts and acceptances, with one drafter or several."""

        def check(drawn: list[Life], data: st.DataObject) -> None:
            self._world(data.draw(st.integers(1, 3), label="drafters"), data.draw(_drafts, label="drafts")).live(drawn)

        self._for_any(25, check)

    @_rule("budget.limits")
    def test_limits(self) -> None:
        """Steps without rows, without room to draft, without a draft; a second drafter; and all of these at first."""
        nothing, none_drafted = Decision(0, 0, 0, 1), Decision(9, 0, 0, 1)
        with renamed("budget.limits", unless=lambda: self._few_steps(1, [AGREEABLE])):
            for script in ([nothing], [none_drafted], [AGREEABLE, nothing], [none_drafted, AGREEABLE]):
                self._few_steps(1, script)
            for num_stages in (2, 3):
                self._few_steps(num_stages, [AGREEABLE, none_drafted, Decision(9, 3, 1, 2)])
            for before in ([], [AGREEABLE]):
                world = self._few_steps(2, before)
                world.step([], [], 30)  # pieces of prompts, and nothing to verify
                world.step([_row("z", 2)], [AGREEABLE])

    @_rule("budget.trees")
    def test_trees(self) -> None:
        """Token trees, whether or not their drafter says how sure it is; none, some and all of it accepted."""
        scripts = [[AGREEABLE], [_STINGY], [Decision(9, 9, 9, 1, turn) for turn in range(1, 8)]]
        for drafts in DRAFTS[1:]:
            for num_stages, script in product((1, 2), scripts):
                with renamed("budget.trees", unless=partial(self._chains, num_stages, script)):
                    self._few_steps(num_stages, script, drafts)

    @_rule("budget.deterministic")
    def test_it_decides_the_same_again(self) -> None:
        """Two new policies that are told the same."""
        self._skip_if_random()
        self._for_any(10, lambda drawn, data: self._deterministic(drawn, data.draw(_drafts, label="drafts")))

    @_rule("budget.release")
    def test_released_requests_are_forgotten(self) -> None:
        """The id of a request that ended comes again, and is treated as a new one."""
        self._skip_if_random()
        self._unknown_ids()

        def check(drawn: list[Life], data: st.DataObject) -> None:
            self._forgotten("budget.release", drawn, None, data.draw(_drafts, label="drafts"))

        self._for_any(12, check, min_size=2)

    @_rule("budget.preemption")
    def test_preempted_requests_begin_anew(self) -> None:
        """A request is released in the middle and comes again with the tokens that it had."""
        self._skip_if_random()

        def check(drawn: list[Life], data: st.DataObject) -> None:
            num_steps = data.draw(st.integers(1, 3), label="steps")
            self._forgotten("budget.preemption", drawn, num_steps, data.draw(_drafts, label="drafts"))

        self._for_any(12, check, min_new_tokens=8)

    @_rule("budget.lossless")
    def test_tokens_equal_plain_greedy(self) -> None:
        """Hypothesis chooses the batch, the drafters, the model, and whether rows are preempted."""

        def check(data: st.DataObject) -> None:
            run = data.draw(runs(self.models), label="run")
            any_drafter = drafters(run.setting.vocab_size, run.setting.references, with_trees=True)
            several = data.draw(st.lists(any_drafter, min_size=1, max_size=2), label="drafters")
            with self._explained():
                decode(dataclasses.replace(run, policy=self._policy()), DenseBackend, several, "budget.lossless")

        self._examples(15, check)

    def _chains(self, num_stages: int, script: Seq[Decision]) -> None:
        self.test_limits()
        self._few_steps(num_stages, script)

    def _few_steps(self, num_stages: int, script: Seq[Decision], drafts: Drafts = "chains") -> PolicyWorld:
        world, rows = self._world(num_stages, drafts), [_row("a", 30), _row("b", 30)]
        for event in [*script] * 3:
            world.step(rows, [event] * len(rows))
        return world

    def _unknown_ids(self) -> None:
        with renamed("budget.release", unless=self.test_limits):
            world = self._world()
            world.release(["never seen", "nor this"])
            row = _row("a", 9)
            world.step([row], [AGREEABLE])
            world.release(["a"])
            world.release(["a"])
            world.step([_row("a", 9)], [AGREEABLE])

    def _deterministic(self, drawn: Seq[Life], drafts: Drafts = "chains") -> None:
        first = self._world(1, drafts).live(drawn).watched.decisions
        for _ in range(3):  # chance may give the same once
            second = self._world(1, drafts).live(drawn).watched.decisions
            _compare("budget.deterministic", first, second, "once", "told the same again")

    def _forgotten(self, rule: str, drawn: Seq[Life], num_steps: int | None = None, drafts: Drafts = "chains") -> None:
        """A request whose id was released before is decided about like one that has a new name and is else the same."""
        decisions = self._come_again(rule, drawn, lambda: self._world(1, drafts), num_steps)
        _compare(rule, *decisions, "after its release", NEW_NAME)

    def _test_simpler_rules(self, rule: str, drawn: Seq[Life]) -> None:
        if rule == "raises":
            self.test_limits()
            self.test_trees()
            self._unknown_ids()
        elif rule in ("release", "preemption"):
            self._deterministic(drawn)
            self._deterministic(_OTHERS)
            if rule == "preemption":
                self._unknown_ids()
                self._forgotten("budget.release", [_alike("a"), *_OTHERS])
                self._forgotten("budget.release", drawn)

    def _skip_if_random(self) -> None:
        if self.decides_at_random:
            pytest.skip("it decides at random, and its decisions are not compared")

    def _world(self, num_stages: int = 1, drafts: Drafts = "chains") -> PolicyWorld:
        return PolicyWorld(self._policy(), num_stages, drafts)

    def _policy(self) -> WatchedPolicy:
        return WatchedPolicy(self._built(self.make_policy, BudgetPolicy))


def _row(name: str, num_tokens: int) -> Row:
    return Row(Request(name, (1, 2, 3), num_tokens))


def _alike(name: str) -> Life:
    return Life(Request(name, (1, 2, 1), 9), (_STINGY, AGREEABLE))


def _compare(rule: str, first: Seq[Decided], second: Seq[Decided], here: str, there: str) -> None:
    for number, ((method, one), (_, other)) in enumerate(zip(first, second, strict=False), start=1):
        if one != other:
            broken(rule, f"decision {number}, of {method}, is {list(one)} {here}, and {list(other)} {there}")
