"""The untimed start leaves nothing behind that would make the timed part faster than it is."""

from __future__ import annotations

from typing import Any

import pytest
from emssd_ragged.backend import ragged_backend
from emssd_suffix import SuffixConfig
from emssd_suffix.drafter import SuffixDrafter

from emssd.decoding.engine import Engine
from emssd.decoding.warmup import warm_up
from emssd.drafting import Drafter
from emssd.drafting.budget import FixedBudget
from emssd.errors import PluginError, PluginWarning
from emssd.metrics.stats import RunReport
from emssd.model import CausalLMRunner
from emssd.sequences import Request
from emssd.testing.drafters import RandomDrafter

PROMPTS = [[5, 6, 7] * 6, [9], [4, 4, 4, 4], [8, 10]]


def engine_of(oracle: Any, *drafters: Drafter, on_drafter_error: str = "fail") -> Engine:
    backend = ragged_backend()
    backend.allocate(oracle.target.kv_cache_spec(2))
    return Engine(
        CausalLMRunner(oracle.target, backend),
        list(drafters),
        batch_size=2,
        budget=FixedBudget(),
        on_drafter_error=on_drafter_error,
    )


def requests() -> list[Request]:
    return [Request(str(i), tuple(ids), 20) for i, ids in enumerate(PROMPTS)]


def test_a_cache_of_outputs_is_empty_again(oracle: Any) -> None:
    config = SuffixConfig(4, 12, cache_tokens=400)
    cold, warm = (engine_of(oracle, SuffixDrafter(config)) for _ in range(2))
    warm_up(warm, requests())
    assert warm.report == RunReport()
    drafted = []
    for engine in (cold, warm):
        for _ in engine.run(requests()):
            pass
        drafted.append((engine.report.draft_length_histogram, engine.report.acceptance_histogram))
    assert drafted[0] == drafted[1]
    for _ in cold.run(requests()):  # not in vain: with what it has learnt it drafts something else
        pass
    assert cold.report.draft_length_histogram != drafted[0][0]


class Stubborn(RandomDrafter):
    def reset(self) -> None:
        raise KeyError("lost")


def test_every_drafter_is_told_and_one_that_fails_is_named(oracle: Any) -> None:
    suffix = SuffixDrafter(SuffixConfig(4, 12, cache_tokens=400))
    with pytest.raises(PluginError, match=r"drafter Stubborn failed in reset: KeyError: 'lost'"):
        warm_up(engine_of(oracle, suffix, Stubborn(oracle.target.vocab_size, 3, seed=0)), requests())
    engine = engine_of(oracle, Stubborn(oracle.target.vocab_size, 3, seed=0), suffix, on_drafter_error="disable")
    with pytest.warns(PluginWarning, match="failed in reset"):
        warm_up(engine, requests())
    assert engine.drafting.drafters[0].failure is not None
    assert suffix._cache is not None
    assert suffix._cache.num_tokens == 0
