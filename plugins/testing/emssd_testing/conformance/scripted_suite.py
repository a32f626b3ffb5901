"""Tests that drafters and budget policies share. Each can break one rule only, so that a failure has its right name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import ClassVar

import pytest
from hypothesis import strategies as st

from emssd.sequences import Request, Row
from emssd_testing.conformance.rules import BrokenRule, broken, renamed
from emssd_testing.conformance.scripted import AGREEABLE, VOCAB_SIZE, Decision, Life, lives
from emssd_testing.conformance.setting import MODEL_LEN
from emssd_testing.conformance.suite import Suite
from emssd_testing.conformance.worlds import World

__all__ = ["ALIKE", "ScriptedSuite"]

_rule = pytest.mark.emssd_rule
_STINGY = Decision(limit=9, keep=9, agree=0, token=1)

ALIKE = [
    Life(Request("a", (1, 2, 3, 1), 9), (_STINGY, AGREEABLE)),
    Life(Request("b", (1, 3, 2, 1, 3), 20), (AGREEABLE, _STINGY), arrival=1),
    Life(Request("c", (2, 1, 2, 1), 20), (AGREEABLE,), arrival=2),
]
"""Requests that have much in common."""


class ScriptedSuite(Suite, ABC):
    """Tests of plugins in an engine that follows scripts.

    Attributes:
        decides_at_random: the plugin draws at random on purpose. Then its outputs are not compared with another's.
    """

    decides_at_random: ClassVar[bool] = False
    _output: ClassVar[str]  # how messages call one, by its number and the request
    _at_random: ClassVar[str]  # why nothing is compared then
    _not_compared = ""  # why outputs were left uncompared, if some were

    @abstractmethod
    def _drawn_world(self, data: st.DataObject) -> Callable[[], World]:
        """Makes worlds that are alike, each with a new plugin."""

    @abstractmethod
    def _new_world(self) -> World:
        """A usual one, with a new plugin."""

    @abstractmethod
    def test_limits(self) -> None:
        """Steps at the limits of the interface."""

    @_rule("deterministic")
    def test_it_decides_the_same_again(self) -> None:
        """New plugins, the same calls."""
        self._for_any(10, lambda drawn, data: self._deterministic(drawn, self._drawn_world(data)))
        self._skip_if_uncompared()

    @_rule("release")
    def test_released_requests_are_forgotten(self) -> None:
        """The id of a request that ended comes again, and is treated as a new one; unknown ids are released."""
        with self._explained():
            self._release()
        self._for_any(12, lambda drawn, data: self._forgotten("release", drawn, self._drawn_world(data)), min_size=2)
        self._skip_if_uncompared()

    @_rule("preemption")
    def test_preempted_requests_begin_anew(self) -> None:
        """Released in the middle, also before a step was observed, and asked again, from all tokens or from fewer."""

        def check(drawn: list[Life], data: st.DataObject) -> None:
            num_steps, abandon = data.draw(st.integers(1, 4), label="steps"), data.draw(st.booleans(), label="abandon")
            fewer, make = data.draw(st.sampled_from([0, 1, 2, 5, 99]), label="tokens lost"), self._drawn_world(data)
            self._forgotten("preemption", drawn, make, num_steps, fewer=fewer, abandon=abandon)

        self._for_any(15, check, min_new_tokens=6)
        self._skip_if_uncompared()

    def _for_any(self, num_examples: int, check: Callable[[list[Life], st.DataObject], object], **kinds: int) -> None:
        """Run `check` on any requests, as `lives` draws them; `kinds` are options of that."""

        def examine(data: st.DataObject) -> None:
            drawn = data.draw(lives(VOCAB_SIZE, **kinds), label="requests")
            with self._explained(drawn):
                check(drawn, data)

        self._examples(num_examples, examine)

    @contextmanager
    def _explained(self, drawn: Seq[Life] = ()) -> Iterator[None]:
        """Name a simpler rule in the place of the broken one, if that rule is broken too: it is the reason."""
        try:
            yield
        except BrokenRule as error:
            self._test_simpler_rules(error.rule.partition(".")[2], drawn)
            raise

    def _test_simpler_rules(self, rule: str, drawn: Seq[Life]) -> None:
        """Test the rules that may be the reason for a broken one."""
        if rule == "raises":
            self.test_limits()
            self._release()
        elif rule in ("isolation", "release", "preemption"):
            for requests in (drawn, ALIKE):
                self._deterministic(requests, self._new_world)
            if rule == "preemption":
                self._release()
                self._forgotten("release", drawn, self._new_world)

    def _few_steps(self, world: World, *scripts: Seq[Decision]) -> World:
        """Rows that follow these scripts, and are released before they end."""
        rows = [Row(Request(f"r{i}", (3, 1, 2) * (i + 2), 50)) for i in range(len(scripts))]
        for step in range(max(3, *map(len, scripts))):
            world.step(rows, [script[step % len(script)] for script in scripts])
        world.release(row.request_id for row in rows)
        return world

    def _release(self) -> None:
        """Unknown ids, the id of a request that ended, the same once more, and that id with another prompt."""
        row = Row(Request("a", (3, 1, 2, 3, 1), 6))
        with renamed(f"{self.kind}.release", unless=self.test_limits):
            world = self._new_world()
            world.release(["never seen", "nor this"])
            while world.step([row], [AGREEABLE]):
                pass
            world.release(["a"])  # once more
            world.step([Row(Request("a", (1, 2, 1), 9))], [AGREEABLE])
        self._forgotten("release", ALIKE, self._new_world)

    def _deterministic(self, drawn: Seq[Life], make_world: Callable[[], World]) -> None:
        first = make_world().live(drawn)
        for _ in range(3 if self._comparable(has_past=False) else 0):  # chance may give the same once
            second = make_world().live(drawn)
            for name in (life.request.request_id for life in drawn):
                one, other = first.outputs(name), second.outputs(name)
                self._compare("deterministic", name, one, other, "at first", "when it was new and asked the same again")

    def _forgotten(
        self,
        rule: str,
        drawn: Seq[Life],
        make_world: Callable[[], World],
        num_steps: int | None = None,
        *,
        fewer: int = 0,
        abandon: bool = False,
    ) -> None:
        """A request whose id was released before is met like one that has a new name and is else the same.

        The first of `drawn` runs beside the others, and is released: at its end, and then comes again with the last
        one's prompt; or after `num_steps`, and comes again with its tokens less `fewer`. With `abandon`, a draft for it
        was never verified. The last one's script decides its steps then.
        """
        outputs = []
        request, last, by_id = drawn[0].request, drawn[-1], {life.request.request_id: life for life in drawn}
        for name in (request.request_id, "a new name"):
            world, first, others = make_world(), drawn[0].row(), [life.row() for life in drawn[1:]]
            running = [first, *others]
            while first in running and (num_steps is None or first.num_steps < num_steps):
                running = world.step(running, [by_id[row.request_id].decision(row) for row in running])
            if abandon and first in running:
                world.propose(running, [AGREEABLE] * len(running))
                world.release(row.request_id for row in running if row is not first)
            world.release([request.request_id])
            prompt = tokens = last.request.prompt_ids
            if num_steps is not None:
                prompt = request.prompt_ids
                tokens = tuple(first.tokens[: max(len(prompt), len(first.tokens) - fewer)])
            rows = [Row(Request(name, prompt, MODEL_LEN - len(prompt), request.eos_token_ids), [*tokens])]
            begun = len(world.outputs(name))
            with renamed(f"{self.kind}.{rule}", unless=self.test_limits):
                for _ in range(4):
                    rows = world.step(rows, [last.decision(row) for row in rows]) if rows else []
            outputs.append(world.outputs(name)[begun:])
        again, new = outputs
        if self._comparable():
            there = "for one that has a new name and is else the same"
            self._compare(rule, request.request_id, again, new, "after its release", there)

    def _compare(self, rule: str, name: str, one: Seq[str], other: Seq[str], here: str, there: str) -> None:
        for number, (first, second) in enumerate(zip(one, other, strict=False), start=1):
            if first != second:
                output = self._output.format(number=number, name=name)
                broken(f"{self.kind}.{rule}", f"as {output} it gave {first} {here}, and {second} {there}")

    def _comparable(self, has_past: bool = True) -> bool:
        """Whether outputs must be those of another plugin, or of one without a past; notes why if not."""
        reason = self._why_uncompared(has_past)
        self._not_compared = reason or self._not_compared
        return not reason

    def _why_uncompared(self, has_past: bool) -> str:
        return self._at_random if self.decides_at_random else ""

    def _skip_if_uncompared(self) -> None:
        """No rule counts as kept where a part of its test was left out."""
        if self._not_compared:
            pytest.skip(self._not_compared)
