"""Requests without a model for a drafter: a script decides what is accepted and which token comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import BudgetPolicy, BudgetStep, Draft
from emssd.model import BorrowedTarget
from emssd.sequences import Batch, Row
from emssd.testing.conformance.rules import named
from emssd.testing.conformance.scripted import Decision, Life, ScriptedEngine, in_turn
from emssd.testing.conformance.watch import Nodes, WatchedDrafter, nodes_of

__all__ = ["World", "live"]


class World:
    """A drafter, or several in turn, and what they drafted.

    Attributes:
        drafts: by request id, what was drafted for it, step by step and drafter by drafter, before it was trimmed.
    """

    def __init__(self, watched: list[WatchedDrafter], vocab_size: int, target: BorrowedTarget | None = None) -> None:
        self.watched = watched
        self._policy = _KeepAsTold()
        self._engine = ScriptedEngine(watched, self._policy, vocab_size, target=target)
        self.drafts = self._policy.drafts

    def propose(self, rows: Seq[Row], decisions: Seq[Decision]) -> Draft:
        """The first half of a step."""
        self._policy.keep = [decision.keep for decision in decisions]
        with named("drafter.raises", "a step"):
            return self._engine.drafting.propose(Batch(tuple(rows)), self._engine.limits(rows, decisions), 0)

    def step(self, rows: Seq[Row], decisions: Seq[Decision]) -> list[Row]:
        """Draft, verify by the script, tell the drafter, and release rows that end. Returns those that go on."""
        self._policy.keep = [decision.keep for decision in decisions]
        with named("drafter.raises", "a step"):
            return self._engine.take(rows, decisions)

    def release(self, request_ids: Iterable[str]) -> None:
        """Tell the drafter that these requests are gone, if there are any."""
        if names := list(request_ids):
            with named("drafter.raises", "a step"):
                self._engine.drafting.release(names)


class _KeepAsTold(BudgetPolicy):
    """Allots what is possible, trims as it was told before the step, and remembers what was drafted."""

    def __init__(self) -> None:
        self.keep: list[int] = []
        self.drafts: dict[str, list[Nodes]] = {}

    def allot(self, step: BudgetStep) -> Seq[int]:
        return step.limits

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        for name, nodes in nodes_of(step.batch, draft).items():
            self.drafts.setdefault(name, []).append(nodes)
        return [min(length, keep) for length, keep in zip(draft.lengths, self.keep, strict=True)]


def live(make_world: Callable[[], World], lives: Seq[Life]) -> World:
    """All of `lives` in a new world, each until it ends."""
    world = make_world()
    in_turn(lives, world.step)
    return world
