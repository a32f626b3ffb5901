"""The engine's tokens are those of plain greedy decoding, exactly, for any drafter; and it cleans up after anything.

Oracle: `greedy_reference`, eager attention without a cache, float64, of equal logits the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_none import NoneDrafter
from emssd_testing.drafters import RandomDrafter
from emssd_testing.strategies import drafters
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, StepPlan
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import StaticScheduler
from emssd.errors import ConfigError, OutOfMemoryError, PromptError
from emssd.sequences import FinishReason, Generation, Request
from tests.support.oracle import MODELS, build, oracle_of
from tests.support.strategies import prompt_batches
from tests.support.tiers import looped

MakeBackend = Callable[[], AttentionBackend]
MAX_NEW = 14


@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_any_drafter_gives_exactly_the_tokens_of_greedy_decoding(
    data: st.DataObject, make_backend: MakeBackend
) -> None:
    oracle = oracle_of(data.draw(st.sampled_from(list(MODELS)), label="model"))
    ids = st.integers(0, oracle.vocab_size - 1)
    prompts = data.draw(prompt_batches(oracle.vocab_size, 5, 20), label="prompts")
    limits = [data.draw(st.integers(1, MAX_NEW), label="max_new_tokens") for _ in prompts]
    eos = data.draw(st.frozensets(ids, max_size=2), label="eos")
    references, with_trees = oracle.references(prompts, MAX_NEW), make_backend().takes_trees
    drafter = data.draw(drafters(oracle.vocab_size, references, with_trees=with_trees), label="drafter")
    batch_size, caching = data.draw(st.integers(1, 6), label="batch size"), data.draw(st.booleans(), label="caching")
    engine = build(oracle, make_backend, drafter, batch_size, prefix_caching=caching)
    requests = [
        Request(str(i), tuple(prompt), limit, eos)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    done = {generation.request_id: generation for generation in engine.run(requests)}
    assert len(done) == len(requests)
    for request in requests:
        generation = done[request.request_id]
        expected = oracle.reference(request.prompt_ids, request.max_new_tokens, eos)
        assert generation.token_ids == expected
        assert generation.prompt_ids == request.prompt_ids
        assert generation.finish_reason is (FinishReason.EOS if expected[-1] in eos else FinishReason.LENGTH)
    _check_accounting(engine, list(done.values()))
    assert engine.runner.usage.held == 0


def _check_accounting(engine: Engine, done: list[Generation]) -> None:
    report = engine.report
    for generation in done:
        assert 0 <= generation.num_accepted <= generation.num_drafted
        gained = generation.num_steps + generation.num_accepted
        if generation.finish_reason is FinishReason.LENGTH:
            assert len(generation.token_ids) == gained, "budgets leave nothing to cut off at the limit"
        else:
            assert gained - engine.drafting.num_speculative_tokens <= len(generation.token_ids) <= gained
        assert generation.acceptance_length == 1 + generation.num_accepted / generation.num_steps
    assert report.num_row_steps == sum(generation.num_steps for generation in done)
    assert report.num_drafted == sum(generation.num_drafted for generation in done)
    assert report.num_accepted == sum(generation.num_accepted for generation in done)
    assert report.num_new_tokens == sum(len(generation.token_ids) for generation in done)
    assert report.num_tokens + report.num_adopted_tokens == sum(
        len(generation.prompt_ids) + generation.num_steps - 1 + generation.num_drafted for generation in done
    )
    assert sum(report.acceptance_histogram.values()) == report.num_row_steps
    assert sum(k * v for k, v in report.acceptance_histogram.items()) == report.num_accepted + report.num_row_steps
    assert report.num_steps >= max(generation.num_steps for generation in done)


def test_generations_stream_in_finish_order_and_are_returned_in_prompt_order(
    oracle: Any, make_ragged: MakeBackend
) -> None:
    engine = build(oracle, make_ragged, NoneDrafter(), batch_size=2)
    requests = [Request(name, (1, 2), limit) for name, limit in [("a", 3), ("b", 1), ("c", 2), ("d", 2), ("e", 1)]]
    assert [generation.request_id for generation in engine.run(requests)] == ["b", "a", "c", "e", "d"]
    assert engine.report.num_steps == 5, "b makes room for c at once, a and c for d and e"
    static = build(oracle, make_ragged, NoneDrafter(), scheduler=StaticScheduler(2))
    assert [generation.request_id for generation in static.run(requests)] == ["b", "a", "c", "d", "e"]
    assert static.report.num_steps == 3 + 2 + 1
    prompts = [[1, 2, 3], [4], [5, 6], [7]]
    eos = oracle.reference(prompts[1], 1)
    engine.eos_token_ids = frozenset(eos)
    streamed = list(engine.stream(prompts, 6))
    assert streamed[0].request_id == "1"
    returned = engine.generate(prompts, 6)
    assert [generation.request_id for generation in returned] == ["0", "1", "2", "3"]
    assert sorted(streamed, key=lambda generation: generation.request_id) == returned
    assert [generation.token_ids for generation in returned] == [oracle.reference(ids, 6, eos) for ids in prompts]


def test_closing_a_stream_frees_everything_and_the_engine_can_be_used_again(
    oracle: Any, make_backend: MakeBackend, prompts: list[list[int]]
) -> None:
    drafter: Any = RandomDrafter(11, 4, oracle.references(prompts, 8))
    drafter.release = Mock(wraps=drafter.release)
    engine = build(oracle, make_backend, drafter, batch_size=2)
    stream = engine.stream(prompts, [2, 8, 8, 8, 8])
    next(stream)
    assert engine.runner.usage.held > 0
    stream.close()
    assert engine.runner.usage.held == 0
    assert not engine.scheduler.has_work
    released = [name for call in drafter.release.call_args_list for name in call.args[0]]
    assert sorted(released) == ["0", "1", "2", "3", "4"]
    drafter.release.reset_mock()
    done = engine.generate(prompts, 8)
    assert [generation.token_ids for generation in done] == [oracle.reference(ids, 8) for ids in prompts]
    released = [name for call in drafter.release.call_args_list for name in call.args[0]]
    assert sorted(released) == ["0", "1", "2", "3", "4"], "finished ones are released once, too"


def test_a_device_without_room_says_what_to_lower_and_keeps_what_was_finished(
    oracle: Any, make_ragged: MakeBackend, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(oracle, make_ragged, NoneDrafter(), batch_size=2)
    forward = engine.runner.backend.forward

    def full(plan: StepPlan, layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        if engine.report.num_steps == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(plan, layer, *qkv)

    monkeypatch.setattr(engine.runner.backend, "forward", full)
    with pytest.raises(OutOfMemoryError, match="GiB in the KV cache; lower kv_memory, batch_size or") as caught:
        engine.generate(prompts, [2, 9, 9, 9, 9])
    finished = caught.value.finished
    assert [generation.token_ids for generation in finished] == [oracle.reference(prompts[0], 2)]
    assert engine.runner.usage.held == 0


@pytest.mark.parametrize(("kernels", "page_size", "value_dim"), [("torch", 1, 8), ("torch", 16, 8), ("fused", 16, 16)])
def test_peak_kv_memory_is_exactly_the_pages_that_the_rows_of_a_step_need(
    kernels: str, page_size: int, value_dim: int, oracle: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from emssd_ragged.backend import ragged_backend

    drafter = RandomDrafter(11, 6, oracle.references(prompts, 20), seed=3)
    engine = build(oracle, lambda: ragged_backend(page_size, kernels), drafter, batch_size=3)
    plan = Mock(wraps=engine.runner.backend.plan)
    monkeypatch.setattr(engine.runner.backend, "plan", plan)
    engine.generate(prompts, 20)
    page_bytes = page_size * 2 * (2 * (8 + value_dim)) * 8  # layers, KV heads, their key and value dimensions, float64
    steps = [sum(-(-kv_len // page_size) for kv_len in call.args[0].kv_lens) for call in plan.call_args_list]
    assert engine.report.kv_usage.peak_held == max(steps) * page_bytes
    assert engine.report.kv_usage.held == 0


def test_two_runs_at_a_time_and_equal_ids_are_refused_and_the_first_run_goes_on(
    oracle: Any, make_ragged: MakeBackend, prompts: list[list[int]]
) -> None:
    engine = build(oracle, make_ragged, NoneDrafter(), batch_size=1)
    with pytest.raises(ConfigError, match="two requests have the same request_id"):
        next(engine.run([Request("a", (1,), 2), Request("a", (2,), 2)]))
    stream = engine.stream(prompts[:2], 3)
    first = next(stream)
    with pytest.raises(ConfigError, match="still decoding"):
        engine.generate([[1]])
    done = [first, *stream]
    assert [generation.token_ids for generation in done] == [oracle.reference(ids, 3) for ids in prompts[:2]]


def test_bad_limits_and_prompts_are_refused_before_anything_runs(oracle: Any, make_ragged: MakeBackend) -> None:
    engine = build(oracle, make_ragged, NoneDrafter())
    with pytest.raises(ConfigError, match="max_new_tokens is 0; it must be a whole number of at least 1"):
        engine.stream([[1]], 0)
    with pytest.raises(ConfigError, match="max_new_tokens has 2 limits for 3 prompts; give one for each, or one"):
        engine.stream([[1], [2], [3]], [5, 1])
    for bad in ([], [11], [-1], [1] * 64):
        with pytest.raises(PromptError, match="prompt 1"):
            engine.stream([[1], bad])
    assert engine.report.num_steps == 0


@looped(
    ("request_", "error", "message"),
    [
        (Request("a", (1,), 9), ConfigError, "request 'a' is there already"),
        (Request("b", (), 9), PromptError, "prompt b is empty"),
        (Request("b", (1, 11), 9), PromptError, "prompt b has token ids outside the model's vocabulary of 11"),
        (Request("b", (1,) * 64, 9), PromptError, "prompt b has 64 tokens, and the model takes 64"),
        (
            Request("b", (1,), 0),
            ConfigError,
            "request 'b' has max_new_tokens 0; it must be a whole number of at least 1",
        ),
    ],
)
def test_a_request_that_cannot_be_is_refused_when_it_is_added(
    request_: Request, error: type[Exception], message: str, oracle: Any, make_ragged: MakeBackend
) -> None:
    engine = build(oracle, make_ragged, NoneDrafter())
    engine.add(Request("a", (1,), 9))
    with pytest.raises(error, match=message):
        engine.add(request_)
    engine.clear()
    assert not engine.scheduler.has_work
