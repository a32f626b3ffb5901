"""`DrafterConformance`: the tests that every drafter must pass, to be inherited by its author."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import strategies as st

from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.hidden import checked_layers
from emssd.sequences import Request, Row
from emssd_testing.conformance.probes import LEARNS, Probes
from emssd_testing.conformance.rules import broken, named
from emssd_testing.conformance.scripted import VOCAB_SIZE, Decision, Life
from emssd_testing.conformance.setting import BATCH_SIZE, decode, drafters_of, runs, setting
from emssd_testing.conformance.watch import WatchedDrafter
from emssd_testing.conformance.worlds import DrafterWorld
from emssd_testing.oracle import DenseBackend

__all__ = ["DrafterConformance"]

_rule = pytest.mark.emssd_rule


class DrafterConformance(Probes):
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
        self._for_any(25, lambda drawn, _: self._world().live(drawn))

    @_rule("drafter.deterministic")
    def test_it_drafts_the_same_again(self) -> None:
        """Two new drafters, the same calls."""
        self._for_any(10, lambda drawn, _: self._deterministic(drawn))
        self._skip_if_uncompared()

    @_rule("drafter.isolation")
    def test_requests_do_not_touch_each_other(self) -> None:
        """Together and alone, a request gets the same drafts; of a drafter that learns, the same tokens."""
        if self.learns_across_requests:
            self._examples(6, self._exact_with_a_past)
            pytest.skip(LEARNS)
        self._for_any(20, lambda drawn, _: self._isolation(drawn))
        self._skip_if_uncompared()

    @_rule("drafter.release")
    def test_released_requests_are_forgotten(self) -> None:
        """The id of a request that ended comes again with another prompt; ids are released that nobody knows."""
        with self._explained():
            self._release()
        self._for_any(12, lambda drawn, _: self._forgotten("drafter.release", drawn), min_size=2)
        self._skip_if_uncompared()

    @_rule("drafter.preemption")
    def test_preempted_requests_begin_anew(self) -> None:
        """Released in the middle, also before a step was observed, and asked again, from all tokens or from fewer."""

        def check(drawn: list[Life], data: st.DataObject) -> None:
            num_steps, abandon = data.draw(st.integers(1, 4), label="steps"), data.draw(st.booleans(), label="abandon")
            fewer = data.draw(st.sampled_from([0, 1, 2, 5, 99]), label="tokens lost")
            self._forgotten("drafter.preemption", drawn, num_steps, fewer=fewer, abandon=abandon)

        self._for_any(15, check, min_new_tokens=6)
        self._skip_if_uncompared()

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
    def test_report_of_the_cost(self, record_property: Callable[[str, object], None]) -> None:
        """Time per drafted token; reported, and never judged."""
        watched = self._watched(self._context())
        world, step = self._world(watched), Decision(16, 16, 3, 1)
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
        record_property(
            "emssd_cost",
            f"{cost}, {1e6 * seconds / num_steps:.1f} µs per step of up to {BATCH_SIZE} rows "
            f"({num_tokens} tokens in {num_steps} steps; the whole took {1e3 * whole:.1f} ms)",
        )

    def _exact_with_a_past(self, data: st.DataObject) -> None:
        """Two runs with the same drafter."""
        run = data.draw(runs(self.models), label="run")
        watched = self._watched(run.setting.context)
        with self._explained():
            for _ in range(2):
                decode(run, DenseBackend, watched, "drafter.isolation")

    def _world(self, watched: list[WatchedDrafter] | None = None) -> DrafterWorld:
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
