"""Steps without a model for a budget policy: what is drafted, accepted, and how long it took is told, call by call.

The clock is a formula here, so that the same steps can be made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from emssd.drafting import Draft, Drafter, Outcome
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.metrics.stats import PHASES, StepStats, StepTimer
from emssd.sequences import Batch, Sequence
from emssd.testing.conformance.policy_watch import WatchedPolicy
from emssd.testing.conformance.rules import named
from emssd.testing.conformance.world import Decision, Life, decision

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
        self.watched = watched
        self._drafters = [_AsTold(stage if num_stages > 1 else None) for stage in range(num_stages)]
        checked = [CheckedDrafter(each, None, _VOCAB_SIZE, on_error="fail") for each in self._drafters]
        self._stages = DraftStages(checked, watched)

    def step(self, rows: Seq[Sequence], decisions: Seq[Decision], num_prefill: int = 0) -> list[Sequence]:
        """Draft, verify as told, tell the policy; `num_prefill` tokens are of other prompts. Returns who goes on."""
        batch = Batch(tuple(rows))
        for drafter in self._drafters:
            drafter.told = {row.request_id: each.keep for row, each in zip(rows, decisions, strict=True)}
        limits = [max(0, min(each.limit, row.num_remaining - 1)) for row, each in zip(rows, decisions, strict=True)]
        num_uncached = sum(row.num_uncached for row in rows)
        with named("budget.raises", "a step"):
            draft = self._stages.propose(batch, limits, num_prefill, StepTimer())
        before = [len(row.tokens) for row in rows]
        outcome = Outcome(batch, draft, tuple(self._verify(rows, decisions, draft)))
        num_tokens = num_uncached + num_prefill + draft.indptr[-1]
        self.watched.observe(outcome, self._stats(outcome, before, num_tokens, num_prefill))
        self.release(row.request_id for row in rows if row.finish_reason is not None)
        return [row for row in rows if row.finish_reason is None]

    def release(self, request_ids: Iterable[str]) -> None:
        """As the engine does: once a step, also of nobody."""
        self.watched.release(list(request_ids))

    def _verify(self, rows: Seq[Sequence], decisions: Seq[Decision], draft: Draft) -> Iterable[Seq[int]]:
        for row, each, length in zip(rows, decisions, draft.lengths, strict=True):
            num_accepted = min(each.agree, length)
            taken = row.taken([1] * num_accepted + [each.token % _VOCAB_SIZE])
            row.advance(*taken, num_drafted=length, num_accepted=num_accepted)
            yield range(num_accepted)

    def _stats(self, outcome: Outcome, before: Seq[int], num_tokens: int, num_prefill: int) -> StepStats:
        """Of a machine on which 64 tokens take twice the time of one, and a drafted token a hundredth."""
        seconds = dict.fromkeys(PHASES, 1e-5) | {"forward": 1e-3 * (1 + num_tokens / 64)}
        stages = tuple(replace(each, seconds=1e-5 * max(each.budget, default=0)) for each in self._stages.stats)
        seconds["draft"] = sum(each.seconds for each in stages)
        rows = outcome.batch.sequences
        return StepStats(
            is_prefill=num_tokens > len(rows) + outcome.draft.indptr[-1],
            num_rows=len(rows) + (num_prefill > 0),
            num_waiting=0,
            num_tokens=num_tokens,
            num_kv_tokens=sum(before) + num_tokens,
            num_new_tokens=sum(len(row.tokens) for row in rows) - sum(before),
            drafted=tuple(outcome.draft.lengths),
            acceptance=tuple(len(nodes) + 1 for nodes in outcome.accepted),
            input_padding=0,
            kv_padding=0,
            num_preempted=0,
            seconds=seconds,
            stages=stages,
        )

    def live(self, lives: Seq[Life]) -> PolicyWorld:
        """All of `lives`, each from its arrival to its end, beside pieces of prompts now and then."""
        rows, step, waiting = list[Sequence](), 0, sorted(lives, key=lambda life: life.arrival)
        by_id = {life.request.request_id: life for life in lives}
        while rows or waiting:
            while waiting and (waiting[0].arrival <= step or not rows):
                rows.append(waiting.pop(0).sequence())
            rows.reverse()  # no row may count on its place
            told = [decision(row, by_id[row.request_id]) for row in rows]
            rows = self.step(rows, told, 30 * (step % 3 == 1))
            step += 1
        return self


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
