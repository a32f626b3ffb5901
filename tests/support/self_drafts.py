"""What tests of drafters share that run the target's own layers: a target worth guessing, and runs that prove tokens.

Oracles: plain decoding and sampling by hand, without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafting import Drafter, DrafterContext
from emssd.model import BorrowedTarget, CausalLMRunner, TargetModel
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from emssd.testing.oracle import greedy_reference
from tests.support import sampling as reference
from tests.support.perfect_head import perfect_target

__all__ = ["KINDS", "NUM_NEW", "PROMPTS", "decode", "is_full", "make_engine", "run_in_little_memory", "target"]

MODEL_LEN, NUM_NEW = 144, 31
PROMPTS = [[1, 3, 4, 6, 0, 7, 8, 3], [6], [7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 1, 4, 4, 0, 6, 7]]
KINDS: dict[str, list[SamplingParams | None]] = {
    "greedy": [None] * 4,
    "sampled": [SamplingParams(temperature=1 + row, seed=row) for row in range(4)],
    "mixed": [
        None,
        SamplingParams(temperature=6.0, seed=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=3.0, top_p=0.9, frequency_penalty=0.4, logit_bias={2: 3.0}, seed=2),
    ],
}


@cache
def target() -> TargetModel:
    """Its next token depends on its last three, and its stream is another one behind each of its three layers."""
    return TargetModel(perfect_target(MODEL_LEN))


def make_engine(
    build: Callable[[DrafterContext], Drafter],
    backend: Any = "ragged",
    model: TargetModel | None = None,
    **engine: Any,
) -> Engine:
    """An engine whose drafter has caches of its own, each as large as the target's."""
    chosen, model = (
        EngineOptions(on_drafter_error=OnDrafterError.fail, **({"batch_size": 4} | engine)),
        model or target(),
    )
    limit = None if chosen.kv_memory is None else int(chosen.kv_memory) // model.kv_cache_spec(1).bytes_per_token()
    context = DrafterContext(
        model.vocab_size,
        None,
        lambda path, trees=False: pytest.fail("asks for no model"),
        lambda name, values: pytest.fail("asks for no other"),
        "fail",
        BorrowedTarget(model),
        replace(model.kv_cache_spec(chosen.batch_size), continuous=backend == "ragged", max_tokens=limit),
        lambda own: make_backend(own, backend, Registry()),
    )
    engine = Engine.assemble(model, None, drafter=build(context), backend=backend, budget="fixed", options=chosen)
    assert context.target is not None
    assert isinstance(engine.runner, CausalLMRunner)
    context.target.attach(engine.runner)
    return engine


@cache
def _greedy(prompt: tuple[int, ...], num_new: int) -> tuple[int, ...]:
    return tuple(greedy_reference(target().model, prompt, num_new))


@cache
def _text(name: str, prompt: tuple[int, ...], params: SamplingParams | None) -> tuple[int, ...]:
    if params is None:
        return _greedy(prompt, NUM_NEW)
    return reference.sampled(target().model, prompt, NUM_NEW, params, name)


def decode(engine: Engine, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Generation]:
    """In order; every token is that of decoding by hand."""
    pairs = enumerate(zip(PROMPTS, kinds, strict=True))
    requests = [Request(str(row), tuple(ids), NUM_NEW, sampling=kind) for row, (ids, kind) in pairs]
    done = {generation.request_id: generation for generation in engine.run(requests)}
    for request in requests:
        expected = _text(request.request_id, request.prompt_ids, request.sampling)
        assert done[request.request_id].token_ids == expected
    return [done[request.request_id] for request in requests]


def is_full(engine: Engine, depth: int) -> bool:
    """Whether every draft was accepted down to its last level: each step gives `depth` + 1 tokens, if a row goes on."""
    left = NUM_NEW % (depth + 1)
    return engine.report.acceptance_histogram == {depth + 1: 4 * (NUM_NEW // (depth + 1))} | ({left: 4} if left else {})


def run_in_little_memory(build: Callable[[DrafterContext], Drafter]) -> Engine:
    """Decode long rows in room for too few tokens: rows are preempted, and get every token of decoding by hand."""
    limit = str(256 * target().kv_cache_spec(1).bytes_per_token())
    engine = make_engine(build, kv_memory=limit, max_step_tokens=16, batch_size=3)
    for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS, 120, ignore_eos=True), strict=True):
        assert generation.token_ids == _greedy(tuple(prompt), 120)
    assert engine.report.num_preempted > 0
    return engine
