"""Records from real runs: acceptance traces for `Simulator`, and the figures of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from emssd.decoding.engine import Engine
from emssd.drafting import Draft, Drafter, Outcome, StepStats
from emssd.drafting.budget import FixedBudget
from emssd.sequences import Batch, Row
from emssd_lab.simulate.traces import RequestTrace, StageTrace, Trace

__all__ = ["logged_steps", "record_trace"]


class TraceRecorder(Drafter):
    """Asks a drafter at every output position and keeps the answers to itself, so that the target decodes alone.

    As every position is visited, any budget can be replayed. This holds for drafters whose draft depends on the row's
    tokens only, and for which a smaller budget gives the beginning: retrieval, draft models.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self._drafter = drafter
        self.rows: dict[str, Row] = {}  # by request id
        self._drafts: dict[str, dict[int, list[int]]] = {}  # by output position

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = self._drafter.propose(batch, budget)
        token_ids = draft.token_ids.tolist()
        for row, start, stop in zip(batch, draft.indptr, draft.indptr[1:], strict=False):
            position = len(row.tokens) - len(row.request.prompt_ids)
            self.rows[row.request_id] = row
            self._drafts.setdefault(row.request_id, {})[position] = token_ids[start:stop]
        return Draft.empty(len(batch))

    def observe(self, outcome: Outcome) -> None:
        self._drafter.observe(outcome)

    def release(self, request_ids: Iterable[str]) -> None:
        self._drafter.release(request_ids)

    def stage(self, request_id: str) -> StageTrace:
        """The recorded trace of a request that has ended.

        Drafted tokens after an EOS count as wrong: nobody knows what the target would have gone on with.
        """
        output, drafts = self.rows[request_id].output_ids, self._drafts[request_id]
        made = [drafts[position] for position in range(len(output))]
        right = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, output[position:], strict=False)))
            for position, draft in enumerate(made)
        ]
        return StageTrace(tuple(map(len, made)), tuple(right))


def record_trace(engine: Engine, prompts: Iterable[str | Seq[int]], **options: Any) -> Trace:
    """Decode `prompts` at the speed of plain greedy decoding and record what the engine's drafters would do.

    Prompts and options are those of `Engine.generate`. The engine is idle, and afterwards it is as it was.
    """
    stages, policy = engine.drafting.drafters, engine.drafting.policy
    drafters = [stage.drafter for stage in stages]
    recorders = [TraceRecorder(drafter) for drafter in drafters]
    try:
        engine.drafting.policy = FixedBudget()
        for stage, recorder in zip(stages, recorders, strict=True):
            stage.drafter = recorder
        names = [generation.request_id for generation in engine.generate(prompts, **options)]
    finally:
        engine.drafting.policy = policy
        for stage, drafter in zip(stages, drafters, strict=True):
            stage.drafter = drafter
    requests = []
    for name in names:
        row, traces = recorders[0].rows[name], tuple(recorder.stage(name) for recorder in recorders)
        num_prompt = len(row.request.prompt_ids)
        requests.append(RequestTrace(name, num_prompt, row.max_length - num_prompt, traces))
    return Trace(tuple(recorder.num_speculative_tokens for recorder in recorders), tuple(requests))


@contextmanager
def logged_steps(engine: Engine) -> Iterator[list[StepStats]]:
    """The figures of the steps that `engine` takes meanwhile."""
    steps, learn = list[StepStats](), engine.drafting.learn

    def keep(outcome: Outcome, stats: StepStats) -> None:
        steps.append(stats)
        learn(outcome, stats)

    engine.drafting.learn = keep  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del engine.drafting.learn
