"""Steps without a model for a budget policy: what is drafted, accepted, and how long it took comes from a script.

The clock is a formula here, so that the same steps can be made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from numbers import Integral
from random import Random
from typing import Any, Literal, get_args

from emssd.decoding.outcome import StepTimer
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode, Drafter, GoesOn, Outcome, StepStats
from emssd.metrics.stats import PHASES
from emssd.sequences import Batch
from emssd_testing.conformance.rules import broken, named
from emssd_testing.conformance.scripted import Decision, ScriptedEngine, World
from emssd_testing.conformance.watch import reading

__all__ = ["DRAFTS", "Decided", "Drafts", "PolicyWorld", "WatchedPolicy"]

Decided = tuple[str, tuple[int, ...]]
"""The method, and what it said of each row."""


class WatchedPolicy(BudgetPolicy):
    """Passes every call on to another policy, and remembers in `decisions` what it decided."""

    def __init__(self, policy: BudgetPolicy) -> None:
        self.policy = policy
        self.decisions: list[Decided] = []
        self.max_depth = policy.max_depth

    def allot(self, step: BudgetStep) -> list[int]:
        limits = list(step.limits)
        with reading("budget", f"allot with the limits {limits} in stage {step.stage}", step.batch):
            lengths = self.policy.allot(step)
        return self._decided("allot", lengths, limits)

    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
        with reading("budget", f"goes_on of {list(map(len, newest))} nodes in stage {step.stage}", step.batch):
            answers = [int(bool(answer)) for answer in self.policy.goes_on(step, newest)]
        return [answer > 0 for answer in self._decided("goes_on", answers, [1] * len(newest))]

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        limits = draft.lengths
        with reading("budget", f"trim of a draft of {limits} tokens in stage {step.stage}", step.batch, draft):
            lengths = self.policy.trim(step, draft)
        return self._decided("trim", lengths, limits)

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        accepted = list(map(len, outcome.accepted))
        with reading("budget", f"observe of {accepted} accepted tokens", outcome.batch, outcome.draft):
            self.policy.observe(outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        with named("budget.raises", f"release of {names}"):
            self.policy.release(names)

    def _decided(self, method: str, lengths: Any, limits: list[int]) -> list[int]:
        """`lengths` as they are, if they are one number for each row, from 0 to its limit."""
        rule = f"budget.{method}"
        with named(rule, f"reading what {method} gave"):
            found = list(lengths)
            if len(found) != len(limits):
                broken(rule, f"{method} gave {found} for {len(limits)} rows; give one number for each")
            for length, limit in zip(found, limits, strict=True):
                if not isinstance(length, Integral) or isinstance(length, bool):
                    broken(rule, f"{method} gave {length!r} among {found}; give whole numbers")
                if not 0 <= int(length) <= limit:
                    broken(
                        rule, f"{method} gave {found}, and the limits are {limits}; give 0 to its limit for each row"
                    )
        self.decisions.append((method, tuple(map(int, found))))
        return found


Drafts = Literal["chains", "trees", "confident trees"]
DRAFTS: tuple[Drafts, ...] = get_args(Drafts)

_VOCAB_SIZE = 7
_LONGEST = 9  # that a drafter proposes
_TOLD = (0.0, 0.1, 0.5, 0.5, 0.9, 1.0)


class PolicyWorld(World):
    """A policy, and drafters that draft by the same script. Of several, the first has nothing for odd lengths."""

    kind, piece = "budget", 30

    def __init__(self, watched: WatchedPolicy, num_stages: int = 1, drafts: Drafts = "chains") -> None:
        drafters = [_ScriptDrafter(stage if num_stages > 1 else None, drafts) for stage in range(num_stages)]
        self.watched = watched
        super().__init__(ScriptedEngine(drafters, watched, _VOCAB_SIZE, _Formula))
        for drafter in drafters:
            drafter.decisions = self.engine.decisions


class _Formula(StepTimer):
    """The time of a machine on which 64 tokens take twice as long as one, and a drafted token a hundredth of that."""

    def timed(self, stats: StepStats) -> StepStats:
        seconds = dict.fromkeys(PHASES, 1e-5) | {"forward": 1e-3 * (1 + stats.num_tokens / 64)}
        stages = tuple(replace(stage, seconds=1e-5 * max(stage.budget, default=0)) for stage in stats.stages)
        return replace(stats, seconds=seconds | {"draft": sum(stage.seconds for stage in stages)}, stages=stages)


class _ScriptDrafter(Drafter):
    """Drafts as many tokens as the script says, within its budget; which tree is drawn by what it is to agree with.

    It asks which rows go on, as drafters do that run a model.
    """

    num_speculative_tokens = _LONGEST
    decisions: Mapping[str, Decision]
    _goes_on: GoesOn | None = None

    def __init__(self, stage: int | None, drafts: Drafts) -> None:
        self.drafts_trees = drafts != "chains"
        self._stage, self._drafts = stage, drafts

    def end_by(self, goes_on: GoesOn | None) -> None:
        self._goes_on = goes_on

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        decisions = [self.decisions[row.request_id] for row in batch]
        wanted = [0 if self._stage == 0 and decision.keep % 2 else decision.keep for decision in decisions]
        lengths = [min(length, limit) for length, limit in zip(wanted, budget, strict=True)]
        if self._goes_on is not None:  # any answer will do
            nodes = [DraftedNode(share, share / 2, length) for length, share in enumerate(_TOLD)]
            self._goes_on({name: nodes[:length] for name, length in zip(batch.request_ids, lengths, strict=True)})
        if self._drafts == "chains":
            return Draft.from_chains([1] * length for length in lengths)
        draws = [Random(decision.turn) for decision in decisions]
        trees = [
            [(node % _VOCAB_SIZE, draw.randrange(-1, node)) for node in range(length)]
            for draw, length in zip(draws, lengths, strict=True)
        ]
        sure = [[draw.choice(_TOLD) for _ in tree] for draw, tree in zip(draws, trees, strict=True)]
        draft = Draft.from_trees(trees, sure if self._drafts == "confident trees" else None)
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])
