"""`DrafterConformance`: the tests that every drafter must pass, to be inherited by its author."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import ClassVar

import pytest
from hypothesis import strategies as st

from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.hidden import checked_layers
from emssd.sequences import Request, Row
from emssd_testing.conformance.rules import broken, named, renamed
from emssd_testing.conformance.scripted import VOCAB_SIZE, Decision, Life
from emssd_testing.conformance.scripted_suite import ALIKE, ScriptedSuite
from emssd_testing.conformance.setting import BATCH_SIZE, decode, drafters_of, runs, setting
from emssd_testing.conformance.watch import WatchedDrafter
from emssd_testing.conformance.worlds import DrafterWorld
from emssd_testing.oracle import DenseBackend

__all__ = ["DrafterConformance"]

_rule = pytest.mark.emssd_rule
_LEARNS = "it learns across requests, and its drafts are not compared"
_LEARNING = (
    ". If it means to learn from other requests, say learns_across_requests = True in its test class, or "
    "--learns-across-requests to emssd-plugins check"
)


class DrafterConformance(ScriptedSuite):
    """Tests of a drafter. Inherit, and say which::

        class TestMine(DrafterConformance):
            plugin = "mine"                      # one that is installed
            options = {"length": 3}

        class TestAnother(DrafterConformance):   # or one that is not
            def make_drafter(self, context):
                return AnotherDrafter(AnotherConfig(), context)

    Each failure names the rule that was broken; docs/reference/drafter_rules.md explains them.

    Attributes:
        learns_across_requests: the drafter means to draft otherwise after other requests. Then its drafts are not
            compared with those of a drafter without a past.
        decides_at_random: the drafter means to. Then its drafts are not compared at all. Tokens still must be exact,
            and the rules that are not tested for either reason are reported as skipped.
    """

    kind = "drafter"
    learns_across_requests: ClassVar[bool] = False
    _output = "draft {number} of request {name!r}"
    _at_random = "it drafts at random, and its drafts are not compared"
    _latest: Seq[Drafter] = ()

    def make_drafter(self, context: DrafterContext) -> Drafter | Seq[Drafter]:
        """A new drafter, or several that are asked in turn; called many times.

        Args:
            context: as of an engine around a tiny target, see `emssd_testing.conformance.setting.setting`.
        """
        spec, config = self.spec(), self.make_config()
        made: Drafter | Seq[Drafter] = spec.build(config, context)
        return made

    @_rule("drafter.build")
    def test_it_is_built(self) -> None:
        """Twice, so that nothing is shared."""
        for _ in range(2):
            self._drafters(self._context())

    @_rule("drafter.draft", "drafter.budget", "drafter.tree", "drafter.depth", "drafter.confidence",
           "drafter.vocabulary", "drafter.batch", "drafter.accounting", "drafter.process",
           "drafter.raises")  # fmt: skip
    def test_every_call_keeps_to_the_interface(self) -> None:
        """Any requests, budgets, trims and acceptances."""
        self._for_any(25, lambda drawn, _: self._new_world().live(drawn))

    @_rule("drafter.isolation")
    def test_requests_do_not_touch_each_other(self) -> None:
        """Together and alone, a request gets the same drafts; of a drafter that learns, the same tokens."""
        if self.learns_across_requests:
            self._examples(6, self._exact_with_a_past)
            pytest.skip(_LEARNS)
        self._for_any(20, lambda drawn, _: self._isolation(drawn))
        self._skip_if_uncompared()

    @_rule("drafter.zero_budget")
    def test_a_budget_of_zero(self) -> None:
        """For all rows of a step, for some, and at first."""
        none, some = Decision(0, 0, 0, 1), Decision(4, 4, 1, 2)

        def without() -> None:
            with renamed("drafter.release"):  # of a row for which it was never asked
                self._new_world().release(["never seen"])
            self._few_steps(self._new_world(), [some], [some])

        with renamed("drafter.zero_budget", unless=without):
            for scripts in ([[none], [none]], [[none, some], [some, none]], [[some], [none]]):
                self._few_steps(self._new_world(), *scripts)

    @_rule("drafter.limits")
    def test_limits(self) -> None:
        """Prompts of one token, one token left, an EOS inside a draft, drafts that are not verified at all."""
        unseen, agreeable = Decision(9, 0, 0, 1), Decision(9, 9, 2, 1)
        never, all_ends, one_ends = frozenset[int](), frozenset(range(VOCAB_SIZE)), frozenset([1])
        requests = [
            Request("a", prompt, num_tokens, eos)
            for prompt in [(1,), (1, 2) * 6, tuple(range(VOCAB_SIZE)) * 2]
            for num_tokens, eos in [(1, never), (2, never), (12, never), (12, all_ends), (12, one_ends)]
        ]
        with renamed("drafter.limits", unless=self.test_a_budget_of_zero):  # which rows meet at their ends as well
            for request in requests:
                for script in (unseen, agreeable):
                    self._new_world().live([Life(request, (script,)), Life(Request("b", (2, 1, 2), 9), (agreeable,))])

    @_rule("drafter.lossless", "drafter.accounting")
    def test_tokens_equal_plain_greedy(self) -> None:
        """Any batch and model of Hypothesis' choice, preempted or not, and what was counted agrees with outcomes."""

        def check(data: st.DataObject) -> None:
            run = data.draw(runs(self.models), label="run")
            watched = self._watched(run.setting.context)
            with self._explained():
                engine = decode(run, DenseBackend, watched, "drafter.lossless")
            heard = [sum(drafter.num_drafted for drafter in watched), sum(drafter.num_accepted for drafter in watched)]
            counted = [engine.report.num_drafted, engine.report.num_accepted]
            if heard != counted:
                broken("drafter.accounting", f"outcomes told of {heard} drafted and accepted tokens; it was {counted}")

        self._examples(15, check)

    @_rule()
    def test_report_of_the_cost(self) -> None:
        """Time per drafted token; reported, and never judged."""
        watched = self._watched(self._context())
        world, step = self._new_world(watched), Decision(16, 16, 3, 1)
        rows = [
            Row(Request(str(row), tuple((row + i % 3) % VOCAB_SIZE for i in range(24)), 30))
            for row in range(BATCH_SIZE)
        ]
        start, num_steps = time.perf_counter(), 0
        with self._explained():
            while rows:
                rows = world.step(rows, [step] * len(rows))
                num_steps += 1
        whole, seconds = time.perf_counter() - start, sum(drafter.seconds for drafter in watched)
        num_tokens = sum(drafter.num_tokens for drafter in watched)
        cost = f"{1e6 * seconds / num_tokens:.1f} µs per drafted token" if num_tokens else "it drafted nothing"
        self.cost = (
            f"{cost}, {1e6 * seconds / num_steps:.1f} µs per step of up to {BATCH_SIZE} rows "
            f"({num_tokens} tokens in {num_steps} steps; the whole took {1e3 * whole:.1f} ms)"
        )

    def _exact_with_a_past(self, data: st.DataObject) -> None:
        """Two runs with the same drafter."""
        run = data.draw(runs(self.models), label="run")
        watched = self._watched(run.setting.context)
        with self._explained():
            for _ in range(2):
                decode(run, DenseBackend, watched, "drafter.isolation")

    def _isolation(self, drawn: Seq[Life]) -> None:
        """Together and alone, a request gets the same drafts; a drafter that learns may do otherwise."""
        together = self._new_world().live(drawn)
        for life in drawn if self._comparable() else ():
            name, alone = life.request.request_id, self._new_world().live([life])
            drafts = together.outputs(name), alone.outputs(name)
            self._compare("isolation", name, *drafts, "beside others", "alone" + _LEARNING)

    def _test_simpler_rules(self, rule: str, drawn: Seq[Life]) -> None:
        if rule in ("release", "preemption"):
            self._test_simpler_rules("isolation", drawn)
            self._isolation(ALIKE)
            self._isolation(drawn)
        super()._test_simpler_rules(rule, drawn)

    def _why_uncompared(self, has_past: bool) -> str:
        return super()._why_uncompared(has_past) or (_LEARNS if has_past and self.learns_across_requests else "")

    def _drawn_world(self, data: st.DataObject) -> Callable[[], DrafterWorld]:
        return self._new_world

    def _new_world(self, watched: list[WatchedDrafter] | None = None) -> DrafterWorld:
        context = self._context()
        return DrafterWorld(watched or self._watched(context), context.vocab_size, context.target)

    def _watched(self, context: DrafterContext) -> list[WatchedDrafter]:
        return [WatchedDrafter(drafter, context.vocab_size) for drafter in self._drafters(context)]

    def _context(self) -> DrafterContext:
        return setting(self.models[0], VOCAB_SIZE).context

    def _drafters(self, context: DrafterContext) -> list[Drafter]:
        with named("drafter.build", "building it"):
            made = self.make_drafter(context)
            drafters = drafters_of(made)
        for drafter in drafters:
            if not isinstance(drafter, Drafter):
                broken("drafter.build", f"it built a {type(drafter).__name__}; give an emssd.drafting.Drafter")
            with named("drafter.build", "num_speculative_tokens"):
                most = drafter.num_speculative_tokens
            if not isinstance(most, int) or isinstance(most, bool) or most < 0:
                broken("drafter.build", f"its num_speculative_tokens is {most!r}; give a whole number, 0 or more")
            with named("drafter.build", "hidden_layers"):
                checked_layers(drafter.hidden_layers)
            if any(drafter is other for other in self._latest):
                broken("drafter.build", f"a second build gave the same {type(drafter).__name__} again; make a new one")
        if not drafters:
            broken("drafter.build", "it built an empty list; give at least one drafter")
        self._latest = drafters
        return drafters
