"""Fixed and drawn calls to a drafter. Each can break one rule only, so that a failure gets its right name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import pytest

from emssd.sequences import Request, Row
from emssd_testing.conformance.rules import broken, renamed
from emssd_testing.conformance.scripted import AGREEABLE, VOCAB_SIZE, Decision, Life
from emssd_testing.conformance.suite import NEW_NAME, ScriptedSuite
from emssd_testing.conformance.watch import Nodes, WatchedDrafter, shown
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
_LEARNING = (
    ". If it means to learn from other requests, say learns_across_requests = True in its test class, or "
    "--learns-across-requests to emssd-plugins check"
)


class Probes(ScriptedSuite):
    """Tests of single rules, for `DrafterConformance`."""

    learns_across_requests: ClassVar[bool] = False
    _not_compared = ""  # why drafts were left uncompared, if some were

    @abstractmethod
    def _world(self, watched: list[WatchedDrafter] | None = None) -> DrafterWorld:
        """A new drafter without a past, or those that are given."""

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
                name = life.request.request_id
                one, other = first.outputs(name), second.outputs(name)
                _compare("drafter.deterministic", name, one, other, "at first", "from another new drafter")

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
            new = self._world().live([Life(second.request, (AGREEABLE,))])
            _compare(
                "drafter.release", "a", world.outputs("a"), new.outputs("a"), "after its release", "from a new drafter"
            )

    def _isolation(self, drawn: Seq[Life]) -> None:
        """Together and alone, a request gets the same drafts; a drafter that learns may do otherwise."""
        together = self._world().live(drawn)
        for life in drawn if self._comparable() else ():
            name, alone = life.request.request_id, self._world().live([life])
            one, other = together.outputs(name), alone.outputs(name)
            _compare("drafter.isolation", name, one, other, "beside others", "alone" + _LEARNING)

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

    def _forgotten(self, rule: str, drawn: Seq[Life], num_steps: int | None = None, **how: Any) -> None:
        """A request whose id was released before gets the drafts of one that has a new name and is else the same."""
        drafts = self._come_again(rule, drawn, self._world, num_steps, **how)
        if self._comparable():
            _compare(rule, drawn[0].request.request_id, *drafts, "after its release", NEW_NAME)

    def _comparable(self, has_past: bool = True) -> bool:
        """Whether drafts must be those of a new drafter; notes why if not."""
        reason = _RANDOM if self.decides_at_random else LEARNS if has_past and self.learns_across_requests else ""
        self._not_compared = reason or self._not_compared
        return not reason

    def _skip_if_uncompared(self) -> None:
        """No rule counts as kept where a part of its test was left out."""
        if self._not_compared:
            pytest.skip(self._not_compared)


def _compare(rule: str, name: str, one: Seq[Nodes], other: Seq[Nodes], here: str, there: str) -> None:
    for number, (first, second) in enumerate(zip(one, other, strict=False), start=1):
        if first != second:
            broken(
                rule,
                f"as draft {number} of request {name!r} it gave {shown(first)} {here}, and {shown(second)} {there}",
            )
