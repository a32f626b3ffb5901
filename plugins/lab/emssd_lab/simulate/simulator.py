"""The decode loop without a model: `Engine.step` over a trace, in simulated time; and its warm-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd_testing.choice_runner import ChoiceRunner

from emssd.attention.pages import PageTable
from emssd.attention.trees import Parents, depths
from emssd.decoding.engine import Engine
from emssd.decoding.outcome import StepTimer
from emssd.decoding.scheduler import Scheduler
from emssd.decoding.warmup import PROMPT_TOKENS
from emssd.decoding.warmup import warm_up as warm_up_engine
from emssd.drafting import BudgetPolicy, Drafter
from emssd.errors import ConfigError
from emssd.metrics.stats import PHASES, RunReport, StepStats
from emssd.sequences import Row
from emssd_lab.simulate.curves import Roofline
from emssd_lab.simulate.recording import logged_steps
from emssd_lab.simulate.trace_drafter import TraceDrafter
from emssd_lab.simulate.traces import VOCAB_SIZE, Trace

__all__ = ["Simulation", "Simulator", "warm_up"]

_PAGE_SIZE = 16  # tokens, as the paged backends have it by default


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulated run.

    Attributes:
        report: with the metrics of ``docs/metrics.md``, in simulated seconds.
        sequences: every request that took part in a step, in order of arrival, where it got to.
    """

    report: RunReport
    steps: Seq[StepStats]
    sequences: Seq[Row]


class Simulator:
    """Takes the steps that an engine would take.

    Args:
        trace: what the drafter offers, and what of it is right.
        budget: gets simulated seconds, ``draft`` and ``forward``; all others are 0.
        max_kv_tokens: how many tokens the KV cache holds, in pages of 16; ``None`` for no limit.
        drafters: in the place of those of the trace, such as a `TreeDrafter`.

    Raises:
        ConfigError: a request that the KV cache could not hold even alone, or a scheduler that is busy.
    """

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        budget: BudgetPolicy,
        curve: Roofline,
        *,
        max_kv_tokens: int | None = None,
        drafters: Seq[Drafter] | None = None,
    ) -> None:
        if scheduler.has_work:
            raise ConfigError("this scheduler has work of another run; give the simulator one of its own")
        runner = TraceRunner(trace, max_kv_tokens)
        self.engine = Engine(
            runner,
            drafters or [TraceDrafter(trace, stage) for stage in range(len(trace.num_speculative_tokens))],
            scheduler=scheduler,
            budget=budget,
            make_timer=lambda: SimulatedTimer(curve),
        )
        self._rows = self._waiting = [request.row() for request in trace]
        for row in self._rows:
            if not runner.fits({row.request_id: row.max_length}):
                raise ConfigError(
                    f"request {row.request_id!r} takes up to {row.max_length} tokens of KV cache, and there "
                    f"is room for {max_kv_tokens}, in pages of {_PAGE_SIZE}; raise max_kv_tokens"
                )

    def run(self, max_steps: int | None = None) -> Simulation:
        """Take steps until all is done, or `max_steps`; a further call goes on from there."""
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps is {max_steps}; it must be at least 1")
        for row in self._waiting:
            self.engine.scheduler.add(row)
        self._waiting = []
        self.engine.report = RunReport()
        with logged_steps(self.engine) as steps:
            while self.engine.has_work and (max_steps is None or len(steps) < max_steps):
                self.engine.step()
        started = [row for row in self._rows if row.num_steps or row.num_cached]
        return Simulation(self.engine.report, steps, started)


class TraceRunner(ChoiceRunner):
    """A target that generates what a trace says, with room for `max_kv_tokens` tokens of KV, in whole pages."""

    def __init__(self, trace: Trace, max_kv_tokens: int | None = None) -> None:
        super().__init__(VOCAB_SIZE)
        self._traces = {request.request_id: request for request in trace}
        self._pages = PageTable(_PAGE_SIZE, None if max_kv_tokens is None else max_kv_tokens // _PAGE_SIZE)

    def choices(self, request_id: str, length: int, drafted: Seq[int], tree: Parents) -> list[int]:
        trace = self._traces[request_id]
        deep = [0, *depths(tree)]
        tokens = trace.tokens(length - trace.num_prompt, max(deep) + 1)
        return [tokens[depth] for depth in deep]

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._pages.fits(kv_lens)


class SimulatedTimer(StepTimer):
    """Steps take the time that a curve says: that of drafting and that of the forward pass, others none."""

    def __init__(self, curve: Roofline) -> None:
        super().__init__()
        self._curve = curve

    def timed(self, stats: StepStats) -> StepStats:
        stages = tuple(
            stage._replace(seconds=self._curve.draft_seconds(
                index, max(stage.budget, default=0), sum(stage.budget), stats.num_kv_tokens))
            for index, stage in enumerate(stats.stages)
        )  # fmt: skip
        seconds = dict.fromkeys(PHASES, 0.0)
        seconds["draft"] = sum(stage.seconds for stage in stages)
        seconds["forward"] = self._curve.verify_seconds(stats.num_tokens, stats.num_kv_tokens)
        return stats._replace(seconds=seconds, stages=stages)


def warm_up(
    policy: BudgetPolicy,
    trace: Trace,
    make_scheduler: Callable[[], Scheduler],
    curve: Roofline,
    drafters: Seq[Drafter] | None = None,
) -> None:
    """The warm-up of a real run, with the first requests of a trace and in simulated time."""
    scheduler = make_scheduler()
    few = tuple(
        dataclasses.replace(request, num_prompt=min(PROMPT_TOKENS, request.num_prompt))
        for request in trace.requests[: scheduler.batch_size]
    )
    simulator = Simulator(dataclasses.replace(trace, requests=few), scheduler, policy, curve, drafters=drafters)
    requests = [dataclasses.replace(request.row().request, max_new_tokens=request.output_length) for request in few]
    warm_up_engine(simulator.engine, requests)
