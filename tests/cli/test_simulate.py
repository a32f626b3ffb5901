"""The simulator takes the steps that the engine takes: for any requests, budget, memory and scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from emssd_lab.simulate import PRESETS, RequestTrace, Simulator, StageTrace, Trace, geometric_trace
from emssd_lab.simulate.curves import Roofline
from emssd_lab.simulate.recording import logged_steps, record_trace
from emssd_lab.simulate.simulator import warm_up
from emssd_testing.drafters import ChainDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import AttentionBackend
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from emssd.drafting import BudgetPolicy, BudgetStep, Draft
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError
from emssd.metrics.stats import StepStats
from emssd.model import CausalLMRunner
from emssd.sequences import FinishReason, Request, Row

CURVE = PRESETS["8b-1xh100"]


class PlaceDrafter(ChainDrafter):
    """Its drafts depend on the position in the output only, as a recorded trace must assume."""

    def __init__(self, plan: Seq[tuple[int, int]], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._plan = plan

    def chain(self, row: Row, limit: int) -> list[int]:
        num_right, num_wrong = self._plan[len(row.output_ids) % len(self._plan)]
        upcoming = self.upcoming(row)
        wrong = [(token + 1) % self.vocab_size for token in upcoming[num_right : num_right + num_wrong]]
        return (upcoming[:num_right] + wrong)[: self.num_speculative_tokens]


class HesitantBudget(BudgetPolicy):
    """Cuts drafts by their rows and stages, and changes its mind with what it heard, and in which order."""

    def __init__(self) -> None:
        self._seen = 0

    def allot(self, step: BudgetStep) -> list[int]:
        less = self._seen + step.num_other_tokens + step.stage
        return [max(0, limit - (less + row) % 2) for row, limit in enumerate(step.limits)]

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        return [min(length, (self._seen + row + step.stage) % 5) for row, length in enumerate(draft.lengths)]

    def observe(self, outcome: Any, stats: StepStats) -> None:
        self._seen = 3 * self._seen % 7 + sum(map(len, outcome.accepted)) + stats.num_tokens

    def release(self, request_ids: Iterable[str]) -> None:
        self._seen += sum(1 + int(request_id) for request_id in request_ids)


def figures(steps: Seq[StepStats], leave_out: Seq[str] = ()) -> list[dict[str, Any]]:
    """Everything but time."""
    out = {"seconds", *leave_out}
    timeless = [step._replace(stages=tuple(stage._replace(seconds=0.0) for stage in step.stages)) for step in steps]
    return [{name: value for name, value in step._asdict().items() if name not in out} for step in timeless]


@given(st.data())
def test_every_step_is_the_engines(
    oracle: Any, make_ragged: Callable[[], AttentionBackend], data: st.DataObject
) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=20), min_size=1, max_size=7))
    limits = [data.draw(st.integers(1, 14)) for _ in prompts]
    eos = data.draw(st.sampled_from([(), (3,)]))
    plans = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=5)
    stages = data.draw(st.lists(st.tuples(plans, st.integers(1, 5)), min_size=1, max_size=2))
    batch_size, max_step_tokens = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([4, 16, 512]))
    max_kv_tokens = data.draw(st.sampled_from([None, 48, 80]))
    is_static, worst_case = data.draw(st.booleans()), data.draw(st.booleans())
    make_policy = data.draw(
        st.sampled_from([lambda: FixedBudget(), lambda: FixedBudget(0), lambda: FixedBudget(1), HesitantBudget])
    )

    def make_scheduler() -> Scheduler:
        if is_static:
            return StaticScheduler(batch_size)
        return ContinuousScheduler(batch_size, max_step_tokens, worst_case=worst_case)

    backend = make_ragged()
    spec = oracle.target.kv_cache_spec(batch_size)
    backend.allocate(dataclasses.replace(spec, continuous=True, max_tokens=max_kv_tokens))
    references = {str(i): oracle.reference(prompt, 14) for i, prompt in enumerate(prompts)}
    drafters = [PlaceDrafter(plan, oracle.target.vocab_size, depth, references) for plan, depth in stages]
    engine = Engine(
        CausalLMRunner(oracle.target, backend),
        drafters,
        scheduler=make_scheduler(),
        eos_token_ids=eos,
        on_drafter_error="fail",
    )
    trace = record_trace(engine, prompts, max_new_tokens=limits)
    assert [stage.drafter for stage in engine.drafting.drafters] == drafters
    engine.drafting.policy = make_policy()
    with logged_steps(engine) as steps:
        engine.generate(prompts, max_new_tokens=limits)
    in_order = tuple(sorted(trace, key=lambda row: int(row.request_id)))  # as the engine got them
    trace = dataclasses.replace(trace, requests=in_order)
    run = Simulator(trace, make_scheduler(), make_policy(), CURVE, max_kv_tokens=max_kv_tokens).run()
    # After an EOS, a drafted token may be right in the engine's eyes, and is never counted as a new token.
    unknown = ["acceptance"] if eos else list[str]()
    if not (eos and make_policy is HesitantBudget):  # which looks at what was accepted there, too
        assert figures(run.steps, unknown) == figures(steps, unknown)
    assert run.report.num_new_tokens == engine.report.num_new_tokens


PLAIN_CURVE = Roofline(  # 1 s for each step; 7 s for each pass of drafting, and 2 s for each token in it
    0.0, 0.0, 0.0, 1.0, 1.0, overhead=1.0, drafts=(Roofline(1.0, 0.0, 0.0, 1.0, 1.0, overhead=7.0),)
)


def test_drafting_takes_the_seconds_of_its_curve_stage_by_stage() -> None:
    trace = geometric_trace(0.5, 4, num_speculative_tokens=3, max_new_tokens=9, seed=0)
    run = Simulator(trace, ContinuousScheduler(4), FixedBudget(), PLAIN_CURVE).run()
    drafting = [step.stages[0].budget for step in run.steps if any(step.stages[0].budget)]
    expected = sum(max(budget) * (7.0 + 2.0 * -(-sum(budget) // max(budget))) for budget in drafting)
    assert run.report.seconds["draft"] == pytest.approx(expected)
    assert sum(step.stages[0].seconds for step in run.steps) == pytest.approx(expected)
    assert run.report.seconds["forward"] == len(run.steps)


@pytest.mark.parametrize("right", [0, 1])
def test_a_row_ends_where_its_trace_does_before_its_limit_also_by_a_drafted_token(right: int) -> None:
    # after two tokens, the third ends the row; it is drafted, rightly or wrongly
    stage = StageTrace((0, 0, 2) if not right else (0, 2, 0), (0, 0, 0) if not right else (0, 2, 0))
    trace = Trace((2,), (RequestTrace("a", 3, 50, (stage,)),))
    run = Simulator(trace, ContinuousScheduler(1), FixedBudget(), PLAIN_CURVE).run()
    (row,) = run.sequences
    assert (len(row.output_ids), row.finish_reason) == (3, FinishReason.EOS)
    assert len(run.steps) == (2 if right else 3)
    assert run.report.num_accepted == 2 * right


def test_what_cannot_run_is_refused() -> None:
    trace = geometric_trace(0.7, 12, num_speculative_tokens=3, num_prompt=30, max_new_tokens=150)
    with pytest.raises(ConfigError, match="takes up to 180 tokens of KV cache, and there is room for 160"):
        Simulator(trace, ContinuousScheduler(4, 64), FixedBudget(), CURVE, max_kv_tokens=160).run()
    scheduler = ContinuousScheduler(1)
    scheduler.add(Row(Request("busy", (1,), 1)))
    with pytest.raises(ConfigError, match="work of another run"):
        Simulator(geometric_trace(0.5, 1, num_speculative_tokens=1), scheduler, FixedBudget(), CURVE)


def test_a_policy_sees_steps_without_drafts_with_short_and_with_long_ones_before_it_decides() -> None:
    class Watcher(FixedBudget):
        def __init__(self) -> None:
            super().__init__()
            self.depths: set[int] = set()
            self.released: set[str] = set()

        def observe(self, outcome: Any, stats: StepStats) -> None:
            self.depths.add(max(stats.drafted, default=0))

        def release(self, request_ids: Any) -> None:
            self.released |= set(request_ids)

    trace = geometric_trace(0.7, 9, num_speculative_tokens=5, num_prompt=300, max_new_tokens=40)
    warm_up(policy := Watcher(), trace, lambda: ContinuousScheduler(4), CURVE)
    assert {0, 2, 5} <= policy.depths
    assert policy.released == {"0", "1", "2", "3"}
