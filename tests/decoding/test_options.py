"""Options of an engine: batching and admission are what was asked for, and what cannot be is refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from emssd_ragged import Kernels, RaggedConfig
from emssd_testing.models import tiny_model

from emssd import Engine
from emssd.decoding.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from emssd.errors import ConfigError, PluginError
from tests.support.tiers import looped


@looped(
    ("backend", "batching", "expected"),
    [
        ("ragged", "auto", ContinuousScheduler),
        ("ragged", "continuous", ContinuousScheduler),
        ("ragged", "static", StaticScheduler),
        ("padded", "auto", StaticScheduler),
        ("padded", "static", StaticScheduler),
    ],
)
def test_batching_is_what_was_asked_for_and_auto_what_the_backend_can(
    backend: str, batching: str, expected: type[Scheduler]
) -> None:
    engine = Engine.from_model(tiny_model(), backend=backend, batching=batching, batch_size=2, drafter="none")
    assert type(engine.scheduler) is expected
    assert engine.batch_size == 2
    done = engine.generate([[3], [4, 5], [6]], [2, 5, 1], ignore_eos=True)
    assert [len(row.token_ids) for row in done] == [2, 5, 1]
    assert engine.report.num_steps == (5 if expected is ContinuousScheduler else 6)


def test_a_backend_that_cannot_batch_continuously_says_why() -> None:
    with pytest.raises(
        PluginError, match=r"'padded' cannot serve this model: .*refilled only when all of them are done"
    ):
        Engine.from_model(tiny_model(), backend="padded", batching="continuous")


def test_worst_case_admission_is_an_option() -> None:
    tokens = 2 * 100 + 20  # two requests to their ends, and a bit

    def preempted(admission: str) -> int:
        model = tiny_model(max_model_len=256)
        token_bytes = 2 * 2 * 32 * 8  # layers, keys and values, hidden size, float64
        plain = RaggedConfig(kernels=Kernels.torch)  # whose pages hold narrow heads without padding
        limit = str(tokens * token_bytes)
        engine = Engine.from_model(
            model, drafter="none", backend=plain, admission=admission, kv_memory=limit, batch_size=4
        )
        done = engine.generate([[3] * 5] * 4, 95, ignore_eos=True)
        assert len({generation.token_ids for generation in done}) == 1
        assert engine.report.kv_usage.peak_pool <= tokens * token_bytes
        return engine.report.num_preempted

    assert preempted("worst_case") == 0
    assert preempted("preempt") > 0


@looped(
    ("option", "message"),
    [
        ({"batching": "dynamic"}, "batching is 'dynamic'; choose one of auto, continuous, static"),
        ({"drafer": 4}, r"unknown option 'drafer' \(did you mean 'drafter'\?\); an engine takes batch_size, .*backend"),
        ({"batch_size": "8"}, "batch_size is '8'; it must be a whole number"),
        ({"prefix_caching": "no"}, "prefix_caching is 'no'; it must be true or false"),
    ],
)
def test_unknown_options_and_choices_are_refused_with_what_there_is(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.from_model(tiny_model(), **option)
