"""`BudgetPolicyConformance`: the tests that every budget policy must pass, to be inherited by its author."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import product

import pytest
from hypothesis import strategies as st

from emssd.drafting import BudgetPolicy
from emssd.sequences import Request, Row
from emssd_testing.conformance.rules import renamed
from emssd_testing.conformance.scripted import AGREEABLE, Decision, Life
from emssd_testing.conformance.scripted_suite import ScriptedSuite
from emssd_testing.conformance.setting import decode, runs
from emssd_testing.conformance.watch import WatchedPolicy
from emssd_testing.conformance.worlds import DRAFTS, Drafts, PolicyWorld
from emssd_testing.oracle import DenseBackend
from emssd_testing.strategies import drafters

__all__ = ["BudgetPolicyConformance"]

_rule = pytest.mark.emssd_rule
_drafts = st.sampled_from(DRAFTS)


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
    _output = "decision {number}"
    _at_random = "it decides at random, and its decisions are not compared"

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
            num_stages, drafts = data.draw(st.integers(1, 3), label="drafters"), data.draw(_drafts, label="drafts")
            self._new_world(num_stages, drafts).live(drawn)

        self._for_any(25, check)

    @_rule("budget.limits")
    def test_limits(self) -> None:
        """Steps without rows, without room to draft, without a draft; a second drafter; and all of these at first."""
        nothing, none_drafted = Decision(0, 0, 0, 1), Decision(9, 0, 0, 1)
        with renamed("budget.limits", unless=lambda: self._few_steps(self._new_world(), [AGREEABLE])):
            for script in ([nothing], [none_drafted], [AGREEABLE, nothing], [none_drafted, AGREEABLE]):
                self._few_steps(self._new_world(), script, script)
            for num_stages in (2, 3):
                self._few_steps(self._new_world(num_stages), [AGREEABLE, none_drafted, Decision(9, 3, 1, 2)])
            for world in (self._new_world(2), self._few_steps(self._new_world(2), [AGREEABLE])):
                world.step([], [], 30)  # pieces of prompts, and nothing to verify
                world.step([Row(Request("z", (1, 2, 3), 2))], [AGREEABLE])

    @_rule("budget.trees")
    def test_trees(self) -> None:
        """Token trees, whether or not their drafter says how sure it is; none, some and all of it accepted."""
        scripts = [[AGREEABLE], [Decision(9, 9, 0, 1)], [Decision(9, 9, 9, 1, turn) for turn in range(1, 8)]]
        for drafts, num_stages, script in product(DRAFTS[1:], (1, 2), scripts):
            with renamed("budget.trees", unless=partial(self._chains, num_stages, script)):
                self._few_steps(self._new_world(num_stages, drafts), script, script)

    @_rule("budget.lossless")
    def test_tokens_equal_plain_greedy(self) -> None:
        """Hypothesis chooses the batch, the drafters, the model, and whether rows are preempted."""

        def check(data: st.DataObject) -> None:
            run = data.draw(runs(self.models), label="run")
            any_drafter = drafters(run.setting.target.vocab_size, run.setting.references, with_trees=True)
            several = data.draw(st.lists(any_drafter, min_size=1, max_size=2), label="drafters")
            with self._explained():
                decode(dataclasses.replace(run, policy=self._policy()), DenseBackend, several, "budget.lossless")

        self._examples(15, check)

    def _chains(self, num_stages: int, script: Seq[Decision]) -> None:
        self.test_limits()
        self._few_steps(self._new_world(num_stages), script, script)

    def _test_simpler_rules(self, rule: str, drawn: Seq[Life]) -> None:
        if rule == "raises":
            self.test_trees()
        super()._test_simpler_rules(rule, drawn)

    def _drawn_world(self, data: st.DataObject) -> Callable[[], PolicyWorld]:
        return partial(self._new_world, 1, data.draw(_drafts, label="drafts"))

    def _new_world(self, num_stages: int = 1, drafts: Drafts = "chains") -> PolicyWorld:
        return PolicyWorld(self._policy(), num_stages, drafts)

    def _policy(self) -> WatchedPolicy:
        return WatchedPolicy(self._built(self.make_policy, BudgetPolicy))
