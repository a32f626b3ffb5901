"""An untimed start: caches are filled, thread pools started, and a budget policy sees how long steps take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.budget import BudgetPolicy
from emssd.draft import Draft, Outcome
from emssd.engine import Engine
from emssd.sequence import Batch, Request
from emssd.stats import RunReport, StepStats

__all__ = ["warm_up"]

_NEW_TOKENS = 8
_PROMPT_TOKENS = 128  # the end of a prompt is enough to see steps of every size


class _Held(BudgetPolicy):
    """Holds every row to the same number of drafted tokens; what is observed goes to the policy that runs later."""

    def __init__(self, inner: BudgetPolicy, num_tokens: int) -> None:
        self._inner = inner
        self._num_tokens = num_tokens

    def allot(self, batch: Batch, limits: Seq[int], num_other_tokens: int, stage: int = 0) -> list[int]:
        self._inner.allot(batch, limits, num_other_tokens, stage)
        return [min(limit, self._num_tokens) for limit in limits]

    def trim(self, batch: Batch, draft: Draft, num_other_tokens: int, stage: int = 0) -> Seq[int]:
        return draft.lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self._inner.observe(outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        self._inner.release(request_ids)


def warm_up(engine: Engine, requests: Seq[Request]) -> None:
    """Run a batch of `requests` for a few tokens, at several lengths of drafts. Leaves an empty report.

    A policy that learns is shown a whole range of steps: no drafts, short ones, and the longest.
    """
    few = [
        dataclasses.replace(
            request,
            prompt_ids=request.prompt_ids[-_PROMPT_TOKENS:],
            max_new_tokens=min(_NEW_TOKENS, request.max_new_tokens),
            eos_token_ids=frozenset(),
        )
        for request in requests[: engine.batch_size]
    ]
    policy, longest = engine.drafting.policy, engine.drafting.num_speculative_tokens
    try:
        for num_tokens in sorted({0, min(2, longest), longest}):
            engine.drafting.policy = _Held(policy, num_tokens)
            for _ in engine.run(few):
                pass
    finally:
        engine.drafting.policy, engine.report = policy, RunReport()
