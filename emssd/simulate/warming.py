"""A policy sees steps of many sizes before a simulated run, as before a real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq

from emssd.decoding.scheduler import Scheduler
from emssd.decoding.warmup import NEW_TOKENS, PROMPT_TOKENS
from emssd.drafting import BudgetPolicy, Drafter
from emssd.drafting.budget import HeldBudget
from emssd.simulate.curves import StepCurve
from emssd.simulate.simulator import Simulator
from emssd.simulate.traces import RequestTrace, StageTrace, Trace

__all__ = ["warm_up"]


def warm_up(
    policy: BudgetPolicy,
    trace: Trace,
    make_scheduler: Callable[[], Scheduler],
    curve: StepCurve,
    drafters: Seq[Drafter] | None = None,
) -> None:
    """Simulate a batch of the first requests for a few tokens: without drafts, with short and with the longest ones."""
    longest = max(each.num_speculative_tokens for each in drafters) if drafters else max(trace.num_speculative_tokens)
    for num_tokens in sorted({0, min(2, longest), longest}):
        scheduler = make_scheduler()
        few = dataclasses.replace(trace, requests=tuple(map(_beginning, trace.requests[: scheduler.batch_size])))
        Simulator(few, scheduler, HeldBudget(policy, num_tokens), curve, drafters=drafters).run()


def _beginning(request: RequestTrace) -> RequestTrace:
    """The first few tokens of a request, ended by its limit."""
    length = min(NEW_TOKENS, request.output_length)
    stages = []
    for stage in request.stages:
        right = tuple(min(count, length - position) for position, count in enumerate(stage.right[:length]))
        stages.append(StageTrace(stage.drafted[:length], right))
    return RequestTrace(request.request_id, min(PROMPT_TOKENS, request.num_prompt), length, tuple(stages))
