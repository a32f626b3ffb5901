"""A step is all or nothing: whoever catches an error and calls `step` again gets the tokens of greedy decoding.

Oracle: `greedy_reference`, float64, on every backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from emssd_testing.drafters import TreeDrafter
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.decoding.engine import Engine
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter, Outcome
from emssd.errors import PluginError
from emssd.metrics.stats import StepStats
from emssd.sequences import Batch, Request, Row

PLACES = ("fits", "plan", "forward", "last layer", "commit", "propose", "observe", "release", "policy")


class BrokenError(Exception):
    """The tests' own error."""


class Faults:
    """Raises at its chosen places, in the chosen calls of each."""

    def __init__(self, due: dict[str, set[int]]) -> None:
        self.due, self.calls, self.raised = due, dict.fromkeys(PLACES, 0), 0

    def at(self, point: str) -> None:
        self.calls[point] += 1
        if self.calls[point] in self.due.get(point, ()):
            self.raised += 1
            raise BrokenError(point)


class FaultyDrafter(TreeDrafter):
    def __init__(self, faults: Faults, oracle: Any, prompts: list[list[int]]) -> None:
        super().__init__(oracle.vocab_size, 6, oracle.references(prompts, 9), right=0.7)
        self._faults = faults

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._faults.at("propose")
        return super().propose(batch, budget)

    def observe(self, outcome: Outcome) -> None:
        self._faults.at("observe")

    def release(self, request_ids: Iterable[str]) -> None:
        self._faults.at("release")


class FaultyPolicy(BudgetPolicy):
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def allot(self, step: BudgetStep) -> list[int]:
        self._faults.at("policy")
        return list(step.limits)

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self._faults.at("policy")

    def release(self, request_ids: Iterable[str]) -> None:
        self._faults.at("policy")


def break_backend(engine: Engine, faults: Faults) -> None:
    """Before a call reaches the backend, or, for the last layer, after it."""
    backend = engine.runner.backend

    def failing(name: str) -> Any:
        real = getattr(backend, name)

        def fail_or_call(*arguments: Any) -> Any:
            faults.at(name)
            return real(*arguments)

        return fail_or_call

    for name in ("fits", "plan", "commit"):
        setattr(backend, name, failing(name))
    forward, last = backend.forward, len(engine.target.layers) - 1

    def failing_forward(plan: Any, layer: int, *qkv: Any) -> Any:
        faults.at("forward")
        out = forward(plan, layer, *qkv)
        if layer == last:
            faults.at("last layer")
        return out

    backend.forward = failing_forward  # type: ignore[method-assign]  # one engine's own


def step_on(engine: Engine, faults: Faults) -> dict[str, Row]:
    """Step until nothing is left, whatever is raised."""
    done: dict[str, Row] = {}
    for _ in range(1000):
        if not engine.has_work:
            return done
        try:
            finished = engine.step()
        except (BrokenError, PluginError):
            continue
        assert not done.keys() & {row.request_id for row in finished}, "a row is returned twice"
        done |= {row.request_id: row for row in finished}
    raise AssertionError(f"no end after {faults.calls}")


@settings(max_examples=8)
@given(
    due=st.dictionaries(st.sampled_from(PLACES), st.sets(st.integers(1, 25), min_size=1), min_size=1),
    limits=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    eos=st.sets(st.integers(0, 4), max_size=1),
)
def test_after_any_error_the_next_step_goes_on(
    due: dict[str, set[int]],
    limits: list[int],
    eos: set[int],
    oracle: Any,
    make_backend: Any,
    build: Any,
    prompts: list[list[int]],
) -> None:
    faults = Faults(due)
    drafter, policy = FaultyDrafter(faults, oracle, prompts), FaultyPolicy(faults)
    engine = build(
        oracle, make_backend, drafter, batch_size=3, prefix_caching=True, budget=policy, on_drafter_error="fail"
    )
    for name, (ids, limit) in enumerate(zip(prompts, limits, strict=True)):
        engine.add(Request(str(name), tuple(ids), limit, frozenset(eos)))
    break_backend(engine, faults)
    done = step_on(engine, faults)
    for name, (ids, limit) in enumerate(zip(prompts, limits, strict=True)):
        assert tuple(done[str(name)].output_ids) == oracle.reference(ids, limit, frozenset(eos)), f"request {name}"
    assert engine.runner.usage.held == 0


class FailsBehindTheLastStep(Drafter):
    num_speculative_tokens = 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.empty(len(batch))

    def observe(self, outcome: Outcome) -> None:
        if any(row.finish_reason is not None for row in outcome.batch):
            raise BrokenError("observe")


def test_rows_that_finish_in_a_step_that_fails_behind_its_tokens_are_not_lost(
    oracle: Any, make_ragged: Any, build: Any, prompts: list[list[int]]
) -> None:
    engine = build(oracle, make_ragged, FailsBehindTheLastStep(), on_drafter_error="fail")
    with pytest.raises(PluginError, match="failed in observe") as caught:
        engine.generate(prompts[:2], [4, 9])
    assert [row.token_ids for row in caught.value.finished] == [oracle.reference(prompts[0], 4)]
    assert not engine.has_work
    assert engine.runner.usage.held == 0


def test_a_model_that_exits_does_not_end_the_process(
    oracle: Any, make_ragged: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(oracle, make_ragged, FailsBehindTheLastStep())

    def leave(*arguments: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(engine.runner.backend, "plan", leave)
    with pytest.raises(PluginError, match=r"the model or the backend called sys.exit\(0\) in a step"):
        engine.generate([[1, 2]], 3)
