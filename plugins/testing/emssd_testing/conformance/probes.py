"""Fixed and drawn calls to a drafter. Each can break one rule only, so that a failure gets its right name."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import ClassVar

import pytest

from emssd.sequences import Request, Row
from emssd_testing.conformance.rules import broken, renamed
from emssd_testing.conformance.scripted import AGREEABLE, VOCAB_SIZE, Decision, Life
from emssd_testing.conformance.suite import ScriptedSuite
from emssd_testing.conformance.watch import WatchedDrafter, shown
from emssd_testing.conformance.worlds import DrafterWorld

__all__ = ["LEARNS", "Probes"]

_rule = pytest.mark.emssd_rule

LEARNS = "it learns across requests, and its drafts are not compared"
"""Why some rules are not tested of some drafters."""

_ALIKE = [
    Life(Request("a", (1, 2, 3, 1), 20), (AGREEABLE,)),
    Life(Request("b", (1, 3, 2, 1, 3), 20), (AGREEABLE,), arrival=1),
    Life(Request("c", (2, 1, 2, 1), 20), (AGREEABLE,), arrival=2),
]
_RANDOM = "it drafts at random, and its drafts are not compared"
_NEW = "from a new drafter"
_LEARNING = (
    ". If it means to learn from other requests, say learns_across_requests = True in its test class, or "
    "--learns-across-requests to emssd-plugins check"
)


class Probes(ScriptedSuite):
    """Tests of single rules, for `DrafterConformance`."""

    learns_across_requests: ClassVar[bool] = False
    _not_compared = ""  # why drafts were left uncompared, if some were

    def _world(self, watched: list[WatchedDrafter] | None = None) -> DrafterWorld:
        """A new drafter without a past, or those that are given."""
        raise NotImplementedError("`DrafterConformance` makes it")

    @_rule("drafter.zero_budget")
    def test_a_budget_of_zero(self) -> None:
        """For all rows of a step, for some, and at first."""
        none, some = Decision(0, 0, 0, 1), Decision(4, 4, 1, 2)
        with renamed("drafter.zero_budget", unless=lambda: self._few_steps([some], [some])):
            self._few_steps([none], [none])
            self._few_steps([none, some], [some, none])
            self._few_steps([some], [none])

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
                    self._world().live([Life(request, (script,)), Life(Request("b", (2, 1, 2), 9), (agreeable,))])

    def _few_steps(self, *scripts: list[Decision]) -> None:
        world = self._world()
        rows = [Row(Request(f"r{i}", (3, 1, 2) * (i + 2), 50)) for i in range(len(scripts))]
        for step in range(3):
            world.step(rows, [script[step % len(script)] for script in scripts])
        world.release(row.request_id for row in rows)

    def _deterministic(self, drawn: Seq[Life]) -> None:
        """New drafters, each asked the same."""
        first = self._world().live(drawn)
        for _ in range(3 if self._comparable(has_past=False) else 0):  # chance may give the same once
            second = self._world().live(drawn)
            for life in drawn:
                _compare("drafter.deterministic", life, first, second, "at first", "from another new drafter")

    def _release(self) -> None:
        """Unknown ids, the id of a request that ended, the same once more, and that id with another prompt."""
        first, second = Row(Request("a", (3, 1, 2, 3, 1), 6)), Row(Request("a", (1, 2, 1), 9))
        with renamed("drafter.release", unless=self.test_limits):
            world = self._world()
            world.release(["never seen", "nor this"])
            while world.step([first], [AGREEABLE]):
                pass
            world.release(["a"])  # once more
            world.drafts.clear()
            world.step([second], [AGREEABLE])
        if self._comparable():
            again = Life(second.request, (AGREEABLE,))
            _compare("drafter.release", again, world, self._world().live([again]), "after its release", _NEW)

    def _isolation(self, drawn: Seq[Life]) -> None:
        """Together and alone, a request gets the same drafts; a drafter that learns may do otherwise."""
        together = self._world().live(drawn)
        for life in drawn if self._comparable() else ():
            alone = self._world().live([life])
            _compare("drafter.isolation", life, together, alone, "beside others", "alone" + _LEARNING)

    def _test_simpler_rules(self, rule: str, drawn: Seq[Life]) -> None:
        if rule == "raises":
            self.test_limits()
            self._release()
        elif rule in ("isolation", "release", "preemption"):
            self._deterministic(drawn or _ALIKE)
            if rule != "isolation":
                self._isolation(_ALIKE)
                self._isolation(drawn)
            if rule == "preemption":
                self._release()

    def _as_if_new(
        self, rule: str, again: Life, make_world: Callable[[], DrafterWorld], tokens: list[int] | None = None
    ) -> None:
        """A drafter with a past drafts for `again`, from `tokens` on, what a new one does."""

        def steps(world: DrafterWorld) -> DrafterWorld:
            rows = [Row(again.request, tokens or [])]
            for _ in range(4):
                rows = world.step(rows, [again.decision(row) for row in rows]) if rows else []
            world.release([again.request.request_id])
            return world

        world = make_world()
        new = steps(self._world())
        with renamed(rule):  # the new one has just made these steps, so its past is the reason
            past = steps(world)
        if self._comparable():
            _compare(rule, again, past, new, "after its release", _NEW)

    def _comparable(self, has_past: bool = True) -> bool:
        """Whether drafts must be those of a new drafter; notes why if not."""
        reason = _RANDOM if self.decides_at_random else LEARNS if has_past and self.learns_across_requests else ""
        self._not_compared = reason or self._not_compared
        return not reason

    def _skip_if_uncompared(self) -> None:
        """No rule counts as kept where a part of its test was left out."""
        if self._not_compared:
            pytest.skip(self._not_compared)


def _compare(rule: str, life: Life, one: DrafterWorld, other: DrafterWorld, here: str, there: str) -> None:
    name = life.request.request_id
    pairs = zip(one.drafts.get(name, []), other.drafts.get(name, []), strict=False)
    for number, (first, second) in enumerate(pairs, start=1):
        if first != second:
            broken(
                rule,
                f"as draft {number} of request {name!r} it gave {shown(first)} {here}, and {shown(second)} {there}",
            )
