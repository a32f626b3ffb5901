"""Requests without a model: a script decides what is accepted and which token comes next, call by call as in an engine.

So a drafter can be driven through any legal order of calls in microseconds, and the same calls can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.metrics.stats import StepTimer
from emssd.sequences import Batch, Request, Sequence
from emssd.testing.conformance.rules import named
from emssd.testing.conformance.watch import WatchedDrafter

__all__ = ["Decision", "Life", "World", "live"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a row in one of its steps.

    Attributes:
        limit: the most tokens to draft; never more than the row has left, less one.
        keep: how many drafted tokens the budget policy lets through.
        agree: how many of them the target would have produced itself.
        token: what it says next; another one where a wrong token was drafted that happens to be this one.
    """

    limit: int
    keep: int
    agree: int
    token: int


@dataclass(frozen=True, slots=True)
class Life:
    """A request and what becomes of it: entry ``i`` modulo the script's length decides its ``i``-th step.

    Attributes:
        arrival: the step in which it comes.
    """

    request: Request
    script: tuple[Decision, ...]
    arrival: int = 0

    def sequence(self) -> Sequence:
        """As it begins."""
        return Sequence(self.request)


@dataclass(slots=True)
class World:
    """A drafter, or several in turn, and what they drafted.

    Attributes:
        watched: the drafters.
        vocab_size: of the target.
        drafts: by request id, what was drafted for it, step by step and drafter by drafter, before it was trimmed.
    """

    watched: list[WatchedDrafter]
    vocab_size: int
    _policy: _KeepAsTold = field(init=False)
    _stages: DraftStages = field(init=False)

    def __post_init__(self) -> None:
        checked = [CheckedDrafter(each, None, self.vocab_size, on_error="fail") for each in self.watched]
        self._policy = _KeepAsTold()
        self._stages = DraftStages(checked, self._policy)

    @property
    def drafts(self) -> dict[str, list[list[int]]]:
        """See above."""
        return self._policy.drafts

    def propose(self, rows: Seq[Sequence], decisions: Seq[Decision]) -> Draft:
        """The first half of a step."""
        most = self._stages.num_speculative_tokens
        limits = [max(0, min(d.limit, most, row.num_remaining - 1)) for row, d in zip(rows, decisions, strict=True)]
        self._policy.keep = [decision.keep for decision in decisions]
        with named("drafter.raises", "a step"):
            return self._stages.propose(Batch(tuple(rows)), limits, 0, StepTimer())

    def step(self, rows: Seq[Sequence], decisions: Seq[Decision]) -> list[Sequence]:
        """Draft, verify by the script, tell the drafter, and release rows that end. Returns those that go on."""
        draft, accepted = self.propose(rows, decisions), list[Seq[int]]()
        tokens = draft.token_ids.tolist()
        for row, decision, start, stop in zip(rows, decisions, draft.indptr, draft.indptr[1:], strict=False):
            chain = tokens[start:stop]
            agreed = min(decision.agree, len(chain))
            following = decision.token % self.vocab_size
            if agreed < len(chain) and chain[agreed] == following:
                following = (following + 1) % self.vocab_size
            accepted.append(range(agreed))
            taken = row.taken([*chain[:agreed], following])
            row.advance(*taken, num_drafted=len(chain), num_accepted=agreed)
        with named("drafter.raises", "a step"):
            self._stages.observe(Outcome(Batch(tuple(rows)), draft, tuple(accepted)))
        self.release(row.request_id for row in rows if row.finish_reason is not None)
        return [row for row in rows if row.finish_reason is None]

    def release(self, request_ids: Iterable[str]) -> None:
        """Tell the drafter that these requests are gone, if there are any."""
        if names := list(request_ids):
            with named("drafter.raises", "a step"):
                self._stages.release(names)


class _KeepAsTold(BudgetPolicy):
    """Allots what is possible, trims as it was told before the step, and remembers what was drafted."""

    def __init__(self) -> None:
        self.keep: list[int] = []
        self.drafts: dict[str, list[list[int]]] = {}

    def allot(self, step: BudgetStep) -> Seq[int]:
        return step.limits

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        tokens = draft.token_ids.tolist()
        for name, start, stop in zip(step.batch.request_ids, draft.indptr, draft.indptr[1:], strict=False):
            self.drafts.setdefault(name, []).append(tokens[start:stop])
        return [min(length, keep) for length, keep in zip(draft.lengths, self.keep, strict=True)]


def live(make_world: Callable[[], World], lives: Seq[Life]) -> World:
    """All of `lives` in a new world, each until it ends."""
    world, rows, step = make_world(), list[Sequence](), 0
    by_id = {life.request.request_id: life for life in lives}
    waiting = sorted(lives, key=lambda life: life.arrival)
    while rows or waiting:
        while waiting and (waiting[0].arrival <= step or not rows):
            rows.append(waiting.pop(0).sequence())
        rows.reverse()  # no row may count on its place
        rows = world.step(rows, [decision(row, by_id[row.request_id]) for row in rows])
        step += 1
    return world


def decision(row: Sequence, life: Life) -> Decision:
    """What happens to `row` in its next step."""
    return life.script[row.num_steps % len(life.script)]
