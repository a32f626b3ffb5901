"""Plugins in an engine without a model: scripts decide how many drafted tokens are accepted, and the next token.

So a plugin can be driven through any legal order of calls in microseconds, and the same calls can be made again. The
clock of a budget policy is a formula.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from random import Random
from typing import ClassVar, Literal, Self, get_args

from emssd.decoding.engine import Engine
from emssd.decoding.outcome import StepTimer
from emssd.decoding.scheduler import Prefill, Schedule
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode, Drafter, GoesOn, StepStats
from emssd.metrics.stats import PHASES
from emssd.model import BorrowedTarget
from emssd.sequences import Batch, Request, Row
from emssd_testing.conformance.rules import named
from emssd_testing.conformance.scripted import VOCAB_SIZE, Decision, Life, ScriptedRunner, ScriptedScheduler
from emssd_testing.conformance.watch import Nodes, WatchedDrafter, WatchedPolicy, nodes_of, shown

__all__ = ["DRAFTS", "DrafterWorld", "Drafts", "PolicyWorld", "World"]

Drafts = Literal["chains", "trees", "confident trees"]
DRAFTS: tuple[Drafts, ...] = get_args(Drafts)

_LONGEST = 9  # that a drafter proposes
_CONFIDENCES = (0.0, 0.1, 0.5, 0.5, 0.9, 1.0)


class World(ABC):
    """Plugins in an engine that follows scripts.

    Attributes:
        kind: of the plugins; whatever a call raises breaks its rule ``KIND.raises``.
        piece: tokens of another prompt that run beside the rows of every third step of `live`.
        decisions: of the step, by request id; empty at first.
    """

    kind: ClassVar[str]
    piece: ClassVar[int] = 0

    def __init__(
        self,
        decisions: dict[str, Decision],
        drafters: Seq[Drafter],
        policy: BudgetPolicy,
        vocab_size: int = VOCAB_SIZE,
        make_timer: Callable[[], StepTimer] = StepTimer,
        target: BorrowedTarget | None = None,
    ) -> None:
        self.decisions, self._scheduler, self._num_steps = decisions, ScriptedScheduler(), 0
        self._engine = Engine(
            ScriptedRunner(vocab_size, target, self.decisions),
            drafters,
            scheduler=self._scheduler,
            budget=policy,
            on_drafter_error="fail",
            make_timer=make_timer,
        )

    def step(self, rows: Seq[Row], decisions: Seq[Decision], num_prefill: int = 0) -> list[Row]:
        """Draft, verify as scripted beside `num_prefill` tokens of another prompt, notify the plugins, and release rows
        that end. Returns the rows that go on.
        """
        self._num_steps += 1
        other = Row(Request("emssd.other", (1,) * (num_prefill + 1), 1))
        pieces = (Prefill(other, num_prefill),) if num_prefill else ()
        self._scheduler.schedule = Schedule(Batch(tuple(rows)), tuple(self._limits(rows, decisions)), pieces)
        try:
            with named(f"{self.kind}.raises", "a step"):
                self._engine.step()
        finally:
            self._scheduler.schedule = None
        return [row for row in rows if row.finish_reason is None]

    def propose(self, rows: Seq[Row], decisions: Seq[Decision]) -> None:
        """The first half of a step."""
        with named(f"{self.kind}.raises", "a step"):
            self._engine.drafting.propose(Batch(tuple(rows)), self._limits(rows, decisions), 0)

    @abstractmethod
    def outputs(self, name: str) -> list[str]:
        """All outputs so far in words: a drafter's for this request, a policy's for all requests."""

    def release(self, request_ids: Iterable[str]) -> None:
        """Notify the plugins that these requests are gone, if there are any."""
        if names := list(request_ids):
            with named(f"{self.kind}.raises", "a step"):
                self._engine.drafting.release(names)

    def live(self, lives: Seq[Life]) -> Self:
        """All of `lives`, each from its arrival to its end."""
        rows, number, waiting = list[Row](), 0, sorted(lives, key=lambda life: life.arrival)
        by_id = {life.request.request_id: life for life in lives}
        while rows or waiting:
            while waiting and (waiting[0].arrival <= number or not rows):
                rows.append(waiting.pop(0).row())
            rows.reverse()  # no row may count on its place
            decisions = [by_id[row.request_id].decision(row) for row in rows]
            rows = self.step(rows, decisions, self.piece * (self._num_steps % 3 == 1))
            number += 1
        return self

    def _limits(self, rows: Seq[Row], decisions: Seq[Decision]) -> list[int]:
        """Make these the decisions of the step. Returns ``[B]`` the most tokens to draft for each row."""
        self.decisions.clear()
        self.decisions.update(zip((row.request_id for row in rows), decisions, strict=True))
        most, trees = self._engine.drafting.num_speculative_tokens, self._engine.drafting.drafts_trees
        depths = [max(0, row.num_remaining - 1) for row in rows]
        lengths = [most if trees and depth else min(most, depth) for depth in depths]
        return [min(decision.limit, length) for decision, length in zip(decisions, lengths, strict=True)]


class DrafterWorld(World):
    """A drafter, or several in turn. Its outputs are the drafts of all steps, before they were trimmed."""

    kind = "drafter"

    def __init__(self, watched: list[WatchedDrafter], vocab_size: int, target: BorrowedTarget | None = None) -> None:
        decisions = dict[str, Decision]()
        policy = _KeepScripted(decisions)
        super().__init__(decisions, watched, policy, vocab_size, target=target)
        self._drafts = policy.drafts

    def outputs(self, name: str) -> list[str]:
        return [f"{shown(nodes)}" for nodes in self._drafts.get(name, [])]


class _KeepScripted(BudgetPolicy):
    """Allots up to the limits, trims as the script says, and remembers all drafts."""

    def __init__(self, decisions: Mapping[str, Decision]) -> None:
        self._decisions = decisions
        self.drafts: dict[str, list[Nodes]] = {}

    def allot(self, step: BudgetStep) -> Seq[int]:
        if not any(step.limits):  # the drafter is not asked
            self.trim(step, Draft.empty(len(step.batch)))
        return step.limits

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        for name, nodes in nodes_of(step.batch, draft).items():
            self.drafts.setdefault(name, []).append(nodes)
        keep = [self._decisions[name].keep for name in step.batch.request_ids]
        return [min(length, most) for length, most in zip(draft.lengths, keep, strict=True)]


class PolicyWorld(World):
    """A policy, and drafters that draft by the same script. Of several, the first has nothing for odd lengths."""

    kind, piece = "budget", 30

    def __init__(self, watched: WatchedPolicy, num_stages: int = 1, drafts: Drafts = "chains") -> None:
        decisions = dict[str, Decision]()
        stages = range(num_stages) if num_stages > 1 else [None]
        self._watched, drafters = watched, [_ScriptDrafter(stage, drafts, decisions) for stage in stages]
        super().__init__(decisions, drafters, watched, make_timer=_Formula)

    def outputs(self, name: str) -> list[str]:
        return [f"{list(numbers)} by {method}" for method, numbers in self._watched.decisions]


class _Formula(StepTimer):
    """The time of a machine on which 64 tokens take twice as long as one, and a drafted token a hundredth of that."""

    def timed(self, stats: StepStats) -> StepStats:
        seconds = dict.fromkeys(PHASES, 1e-5) | {"forward": 1e-3 * (1 + stats.num_tokens / 64)}
        stages = tuple(stage._replace(seconds=1e-5 * max(stage.budget, default=0)) for stage in stats.stages)
        return stats._replace(seconds=seconds | {"draft": sum(stage.seconds for stage in stages)}, stages=stages)


class _ScriptDrafter(Drafter):
    """Drafts as many tokens as the script says, within its budget. The script's turn seeds the shape of a tree.

    It asks which rows go on, as drafters do that run a model.
    """

    num_speculative_tokens = _LONGEST
    _goes_on: GoesOn | None = None

    def __init__(self, stage: int | None, drafts: Drafts, decisions: Mapping[str, Decision]) -> None:
        self.drafts_trees = drafts != "chains"
        self._stage, self._drafts, self._decisions = stage, drafts, decisions

    def end_by(self, goes_on: GoesOn | None) -> None:
        self._goes_on = goes_on

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        decisions = [self._decisions[row.request_id] for row in batch]
        wanted = [0 if self._stage == 0 and decision.keep % 2 else decision.keep for decision in decisions]
        lengths = [min(length, limit) for length, limit in zip(wanted, budget, strict=True)]
        if self._goes_on is not None:  # any answer will do
            nodes = [DraftedNode(share, share / 2, length) for length, share in enumerate(_CONFIDENCES)]
            self._goes_on({name: nodes[:length] for name, length in zip(batch.request_ids, lengths, strict=True)})
        if self._drafts == "chains":
            return Draft.from_chains([1] * length for length in lengths)
        draws = [Random(decision.turn) for decision in decisions]
        trees = [
            [(node % VOCAB_SIZE, draw.randrange(-1, node)) for node in range(length)]
            for draw, length in zip(draws, lengths, strict=True)
        ]
        sure = [[draw.choice(_CONFIDENCES) for _ in tree] for draw, tree in zip(draws, trees, strict=True)]
        draft = Draft.from_trees(trees, sure if self._drafts == "confident trees" else None)
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])
