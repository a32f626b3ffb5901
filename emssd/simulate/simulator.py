"""The decode loop without a model: the real scheduler, drafting stages and budget policy, over a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.attention.pages import PageTable
from emssd.decoding.scheduler import Schedule, Scheduler
from emssd.drafting import BudgetPolicy, Draft, Outcome
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.errors import ConfigError
from emssd.metrics.stats import PHASES, RunReport, StageStats, StepStats, StepTimer
from emssd.sequences import Sequence
from emssd.simulate.curves import StepCurve
from emssd.simulate.trace_drafter import TraceDrafter
from emssd.simulate.traces import RIGHT, WRONG, Trace

__all__ = ["Simulation", "Simulator"]

_PAGE_SIZE = 16  # tokens, as the paged backends have it by default


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated run did.

    Attributes:
        report: with the metrics of ``docs/metrics.md``, in simulated seconds.
        steps: every step.
        sequences: every request that took part in a step, in order of arrival, where it got to.
    """

    report: RunReport
    steps: Seq[StepStats]
    sequences: Seq[Sequence]


class Simulator:
    """Takes the steps that `emssd.decoding.engine.Engine` would take.

    Args:
        trace: what the drafter offers, and what of it is right.
        scheduler: idle.
        budget: hears of simulated seconds, ``draft`` and ``forward``, all others being 0.
        curve: how long steps take.
        max_kv_tokens: how many tokens the KV cache holds, in pages of 16; ``None`` for no limit.

    Raises:
        ConfigError: a request that the KV cache could not hold even alone, or a scheduler that is busy.
    """

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        budget: BudgetPolicy,
        curve: StepCurve,
        *,
        max_kv_tokens: int | None = None,
    ) -> None:
        self.scheduler, self.curve = scheduler, curve
        self._traces = {request.request_id: request for request in trace}
        drafters = [TraceDrafter(trace, stage) for stage in range(len(trace.num_speculative_tokens))]
        self._drafting = DraftStages([CheckedDrafter(drafter, None, 1 + WRONG) for drafter in drafters], budget)
        self._pages = PageTable(_PAGE_SIZE, None if max_kv_tokens is None else max_kv_tokens // _PAGE_SIZE)
        self._sequences = [request.sequence() for request in trace]
        if scheduler.has_work:
            raise ConfigError("this scheduler has work of another run; give the simulator one of its own")
        for sequence in self._sequences:
            if not self._pages.fits([sequence.max_length]):
                raise ConfigError(
                    f"request {sequence.request_id!r} takes up to {sequence.max_length} tokens of KV cache, and there "
                    f"is room for {max_kv_tokens}, in pages of {_PAGE_SIZE}; raise max_kv_tokens"
                )
            scheduler.add(sequence)

    def run(self, max_steps: int | None = None) -> Simulation:
        """Take steps until all is done, or `max_steps`; a further call goes on from there.

        Raises:
            ConfigError: `max_steps` below one.
        """
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps is {max_steps}; it must be at least 1")
        report, steps = RunReport(), list[StepStats]()
        while self.scheduler.has_work and (max_steps is None or len(steps) < max_steps):
            steps.append(self.step())
            report.add(steps[-1], self.scheduler.batch_size)
        return Simulation(report, steps, [row for row in self._sequences if row.num_steps or row.num_cached])

    def step(self) -> StepStats:
        """One step, in the order of `Engine.step`."""
        schedule = self.scheduler.select(self._fits, self._drafting.num_speculative_tokens)
        self._forget(schedule.preempted)
        batch, num_prefilled = schedule.batch, sum(piece.num_tokens for piece in schedule.prefills)
        draft = self._drafting.propose(batch, schedule.limits, num_prefilled, StepTimer())
        num_tokens = sum(row.num_uncached for row in batch) + draft.indptr[-1] + num_prefilled
        num_kv_tokens = sum(len(row.tokens) for row in batch) + draft.indptr[-1]
        num_kv_tokens += sum(piece.sequence.num_cached + piece.num_tokens for piece in schedule.prefills)
        stages = self._stages(num_kv_tokens)
        seconds = dict.fromkeys(PHASES, 0.0)
        seconds["draft"] = sum(stage.seconds for stage in stages)
        seconds["forward"] = self.curve.verify_seconds(num_tokens, num_kv_tokens)
        accepted, num_new_tokens = self._commit(schedule, draft)
        finished = [row for row in batch if row.finish_reason is not None]
        self.scheduler.retire(finished)
        stats = StepStats(
            is_prefill=num_tokens > len(batch) + draft.indptr[-1],
            num_rows=len(batch) + len(schedule.prefills),
            num_waiting=self.scheduler.num_waiting,
            num_tokens=num_tokens,
            num_kv_tokens=num_kv_tokens,
            num_new_tokens=num_new_tokens,
            drafted=tuple(draft.lengths),
            acceptance=tuple(count + 1 for count in accepted),
            input_padding=0,
            kv_padding=0,
            num_preempted=len(schedule.preempted),
            seconds=seconds,
            stages=stages,
        )
        self._drafting.learn(Outcome(batch, draft, tuple(map(range, accepted))), stats)
        self._forget(finished)
        return stats

    def _fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._pages.fits(kv_lens.values())

    def _stages(self, num_kv_tokens: int) -> tuple[StageStats, ...]:
        """What the drafters did, in simulated seconds."""
        stages = []
        for index, stage in enumerate(self._drafting.stats):
            depth = max(stage.budget, default=0)
            seconds = self.curve.draft_seconds(index, depth, sum(stage.budget), num_kv_tokens)
            stages.append(dataclasses.replace(stage, seconds=seconds))
        return tuple(stages)

    def _commit(self, schedule: Schedule, draft: Draft) -> tuple[list[int], int]:
        """Advance every row by its own acceptance. Returns the accepted tokens of each, and the new tokens of all."""
        accepted, num_new_tokens = [], 0
        tokens = draft.token_ids.tolist()
        for row, start, stop in zip(schedule.batch, draft.indptr, draft.indptr[1:], strict=False):
            drafted, num_before = stop - start, len(row.tokens)
            count = sum(token == RIGHT for token in tokens[start:stop])
            position = num_before - len(row.request.prompt_ids)
            taken = row.taken(self._traces[row.request_id].tokens(position, count + 1))
            row.advance(*taken, num_drafted=drafted, num_accepted=count)
            num_new_tokens += len(row.tokens) - num_before
            accepted.append(count)
        for piece in schedule.prefills:
            piece.sequence.set_cached(piece.sequence.num_cached + piece.num_tokens)
        return accepted, num_new_tokens

    def _forget(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.set_cached(0)
        self._drafting.release([sequence.request_id for sequence in sequences])
