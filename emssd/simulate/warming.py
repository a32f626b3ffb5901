"""A policy sees steps of many sizes before a simulated run, as `emssd.warmup.warm_up` has it before a real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from emssd.budget import BudgetPolicy
from emssd.draft import Draft, Outcome
from emssd.scheduler import Scheduler
from emssd.sequence import Batch
from emssd.simulate.curves import StepCurve
from emssd.simulate.simulator import Simulator
from emssd.simulate.traces import RequestTrace, StageTrace, Trace
from emssd.stats import StepStats

__all__ = ["warm_up"]

_NEW_TOKENS, _PROMPT_TOKENS = 8, 128  # of each request, as in `emssd.warmup`


class _Held(BudgetPolicy):
    """Holds every row to the same number of drafted tokens, and lets another policy watch."""

    def __init__(self, policy: BudgetPolicy, num_tokens: int) -> None:
        self._policy, self._num_tokens = policy, num_tokens

    def allot(self, batch: Batch, limits: Seq[int], num_other_tokens: int, stage: int = 0) -> list[int]:
        self._policy.allot(batch, limits, num_other_tokens, stage)
        return [min(limit, self._num_tokens) for limit in limits]

    def trim(self, batch: Batch, draft: Draft, num_other_tokens: int, stage: int = 0) -> Seq[int]:
        return draft.lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self._policy.observe(outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        self._policy.release(request_ids)


def warm_up(policy: BudgetPolicy, trace: Trace, make_scheduler: Callable[[], Scheduler], curve: StepCurve) -> None:
    """Simulate a batch of the first requests for a few tokens: without drafts, with short and with the longest ones."""
    longest = max(trace.num_speculative_tokens)
    for num_tokens in sorted({0, min(2, longest), longest}):
        scheduler = make_scheduler()
        few = dataclasses.replace(trace, requests=tuple(map(_beginning, trace.requests[: scheduler.batch_size])))
        Simulator(few, scheduler, _Held(policy, num_tokens), curve).run()


def _beginning(request: RequestTrace) -> RequestTrace:
    """The first few tokens of a request, ended by its limit."""
    length = min(_NEW_TOKENS, request.output_length)
    stages = []
    for stage in request.stages:
        right = tuple(min(count, length - position) for position, count in enumerate(stage.right[:length]))
        stages.append(StageTrace(stage.drafted[:length], right, stage.confidence and stage.confidence[:length]))
    return RequestTrace(request.request_id, min(_PROMPT_TOKENS, request.num_prompt), length, tuple(stages))
