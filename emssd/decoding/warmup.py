"""An untimed start: caches are filled, thread pools started, and a budget policy sees how long steps take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.decoding.engine import Engine
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd.metrics.stats import RunReport
from emssd.sequences import Request

__all__ = ["warm_up"]

NEW_TOKENS = 8
PROMPT_TOKENS = 128  # the end of a prompt is enough to see steps of every size


def warm_up(engine: Engine, requests: Seq[Request]) -> None:
    """Run a batch of `requests` for a few tokens, at several lengths of drafts. Leaves an empty report.

    A policy that learns is shown a whole range of steps: no drafts, short ones, and the longest. It keeps what it has
    learnt; drafters are reset and prefixes forgotten, because they know texts that are about to be timed.
    """
    few = [
        dataclasses.replace(
            request,
            prompt_ids=request.prompt_ids[-PROMPT_TOKENS:],
            max_new_tokens=min(NEW_TOKENS, request.max_new_tokens),
            eos_token_ids=frozenset(),
        )
        for request in requests[: engine.batch_size]
    ]
    policy, longest = engine.drafting.policy, engine.drafting.num_speculative_tokens
    try:
        for num_tokens in sorted({0, min(2, longest), longest}):
            engine.drafting.policy = HeldBudget(policy, num_tokens)
            engine.runner.forget_prefixes()  # steps with prompts are to be seen, too
            for _ in engine.run(few):
                pass
        engine.drafting.reset()
    finally:
        engine.drafting.policy, engine.report = policy, RunReport()
        engine.runner.forget_prefixes()


class HeldBudget(BudgetPolicy):
    """Holds every row to the same number of drafted tokens. `inner` watches: it is asked too, but not heeded."""

    def __init__(self, inner: BudgetPolicy, num_tokens: int) -> None:
        self._inner, self.max_depth = inner, inner.max_depth
        self._num_tokens = num_tokens

    def allot(self, step: BudgetStep) -> Seq[int]:
        self._inner.allot(step)
        return [min(limit, self._num_tokens) for limit in step.limits]

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        self._inner.trim(step, draft)
        return draft.lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self._inner.observe(outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        self._inner.release(request_ids)
