"""Steps without a model for a budget policy: what is drafted, accepted, and how long it took is told, call by call.

The clock is a formula here, so that the same steps can be made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from emssd.drafting import Draft, Drafter
from emssd.metrics.stats import PHASES, StepStats
from emssd.metrics.timing import StepTimer
from emssd.sequences import Batch, Sequence
from emssd.testing.conformance.policy_watch import WatchedPolicy
from emssd.testing.conformance.rules import named
from emssd.testing.conformance.scripted import Decision, Life, ScriptedEngine, in_turn

__all__ = ["PolicyWorld"]

_VOCAB_SIZE = 7
_LONGEST = 9  # that a drafter proposes


class PolicyWorld:
    """A policy, and drafters in turn that draft what they are told.

    Args:
        watched: the policy.
        num_stages: drafters; of several, the first has nothing for every other length.
    """

    def __init__(self, watched: WatchedPolicy, num_stages: int = 1) -> None:
        self._drafters = [_AsTold(stage if num_stages > 1 else None) for stage in range(num_stages)]
        self.watched = watched
        self._engine = ScriptedEngine(self._drafters, watched, _VOCAB_SIZE, _Formula)
        self._num_steps = 0

    def step(self, rows: Seq[Sequence], decisions: Seq[Decision], num_prefill: int = 0) -> list[Sequence]:
        """Draft, verify as told, tell the policy; `num_prefill` tokens are of another prompt. Returns who goes on."""
        for drafter in self._drafters:
            drafter.told = {row.request_id: each.keep for row, each in zip(rows, decisions, strict=True)}
        self._num_steps += 1
        with named("budget.raises", "a step"):
            return self._engine.take(rows, decisions, num_prefill)

    def release(self, request_ids: Iterable[str]) -> None:
        """Tell the policy to forget these requests."""
        self.watched.release(list(request_ids))

    def live(self, lives: Seq[Life]) -> PolicyWorld:
        """All of `lives`, each from its arrival to its end, beside pieces of prompts now and then."""
        in_turn(lives, lambda rows, told: self.step(rows, told, 30 * (self._num_steps % 3 == 1)))
        return self


class _Formula(StepTimer):
    """The time of a machine on which 64 tokens take twice as long as one, and a drafted token a hundredth of that."""

    def timed(self, stats: StepStats) -> StepStats:
        seconds = dict.fromkeys(PHASES, 1e-5) | {"forward": 1e-3 * (1 + stats.num_tokens / 64)}
        stages = tuple(replace(each, seconds=1e-5 * max(each.budget, default=0)) for each in stats.stages)
        return replace(stats, seconds=seconds | {"draft": sum(each.seconds for each in stages)}, stages=stages)


class _AsTold(Drafter):
    """Drafts as many ones as it is told, within its budget."""

    num_speculative_tokens = _LONGEST

    def __init__(self, stage: int | None) -> None:
        self.told: dict[str, int] = {}
        self._stage = stage

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        told = [self.told[row.request_id] for row in batch]
        wanted = [0 if self._stage == 0 and length % 2 else length for length in told]
        return Draft.from_chains([1] * min(length, limit) for length, limit in zip(wanted, budget, strict=True))
