"""Sampled tokens are those of plain sampling, in float64, with every offered drafter on every CPU backend.

Oracle: sampling written out by hand, one row at a time, by the model's own eager attention without a cache. Plain
decoding, ``drafter=none`` at batch size 1, is held to it like any other run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
from emssd_ragged import RaggedConfig
from emssd_ragged.backend import ragged_backend
from emssd_testing.drafters import PerfectDrafter
from emssd_testing.strategies import policies
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emssd.decoding.engine import Engine
from emssd.decoding.options import Batching, EngineOptions
from emssd.drafting import BudgetPolicy, Draft
from emssd.hooks.registry import PluginWarning
from emssd.sampling import SamplingParams
from emssd.sequences import Request, Row
from tests.sampling.test_engine import VOCAB, Expected, decode, requests, target
from tests.support.backends import CONFIGS as BACKENDS
from tests.support.backends import runner_of
from tests.support.every_drafter import DRAFTERS, EveryDrafter
from tests.support.tiers import only

PAGED = tuple(name for name, config in BACKENDS.items() if isinstance(config, RaggedConfig))
NIGHTLY = {"replay, tree", "early_exit", "eagle, static", "eagle3, chain", "mtp", "medusa, static"}
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # to explain a failure takes minutes


@cache
def every() -> EveryDrafter:
    return EveryDrafter(target())


def right(wanted: Seq[Request], expected: Expected) -> dict[str, tuple[int, ...]]:
    return {request.request_id: expected.of(request) for request in wanted}


def longest_of(wanted: Seq[Request]) -> int:
    return max(len(request.prompt_ids) + request.max_new_tokens for request in wanted)


def test_every_drafter_that_is_offered_is_among_them() -> None:
    named = {name.split(",")[0] for name in DRAFTERS}
    registry = every().registry
    specs = registry.specs("drafter")
    ours = [spec.name for spec in specs if registry.source("drafter", spec.name).startswith("emssd ")]
    assert sorted(ours) == sorted(named)


MIXED = [
    SamplingParams(temperature=0.4, seed=1),
    None,
    SamplingParams(temperature=1.2, top_k=6, top_p=0.9, seed=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, min_p=0.05, typical_p=0.9, logit_bias={3: 1.5, 7: -3.0}, seed=3),
    SamplingParams(temperature=0.5, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, seed=4),
]


def mixed() -> list[Request]:
    """Greedy rows and sampled ones, each with params of its own; no text may be that of another."""
    prompts = [(1, 2, 3, 1, 2, 3, 1, 2), (4,), (5, 6, 7, 8, 9, 10) * 3, (1, 2, 3, 1, 2, 3, 1, 2)]
    return [Request(f"{n}", prompts[n % len(prompts)], 12, sampling=params) for n, params in enumerate(MIXED)]


@pytest.mark.parametrize("drafter", only(DRAFTERS, ci=DRAFTERS.keys() - NIGHTLY))
@pytest.mark.costly("all backends")
def test_rows_with_params_of_their_own_are_right_on_every_backend(drafter: str) -> None:
    wanted = mixed()
    expected = Expected(wanted)
    config, accepted = every().config(drafter, expected), 0
    for number, backend in enumerate(BACKENDS):
        engine = every().engine(config, backend, EngineOptions((3, 6, 2)[number % 3], max_step_tokens=64))
        assert decode(engine, wanted) == right(wanted, expected), backend
        accepted += engine.report.num_accepted
    assert accepted > 0 or drafter == "none", "else nothing was shown"


@settings(phases=PHASES)
@given(
    asked=requests(),
    drafter=st.sampled_from([*DRAFTERS]),
    backend=st.sampled_from([*BACKENDS]),
    batch_size=st.sampled_from([3, 1, 2, 5]),
    batching=st.sampled_from([Batching.auto, Batching.auto, Batching.static]),
    max_step_tokens=st.sampled_from([64, 8, 3]),
    budget=policies(),
    in_little_memory=st.booleans(),
    data=st.data(),
)
def test_tokens_are_those_of_plain_sampling(
    asked: list[Request],
    drafter: str,
    backend: str,
    batch_size: int,
    batching: Batching,
    max_step_tokens: int,
    budget: BudgetPolicy,
    in_little_memory: bool,
    data: st.DataObject,
) -> None:
    expected = Expected(asked)
    engine = every().engine(
        every().config(drafter, expected),
        backend,
        EngineOptions(batch_size, batching, max_step_tokens),
        budget=budget,
        max_tokens=longest_of(asked) if in_little_memory and backend in PAGED else 0,
    )
    assert decode(engine, asked) == right(asked, expected)
    again = data.draw(st.permutations(asked), label="another order")
    assert decode(engine, again) == right(asked, expected), "by drafters that have seen these rows before"


@pytest.mark.parametrize("drafter", ["suffix, tree", "draft_model, dynamic", "union", "lookahead"])
@pytest.mark.parametrize("backend", ["page 1", "fused"])
def test_preempted_rows_go_on_with_the_same_text(drafter: str, backend: str) -> None:
    wanted = [dataclasses.replace(request, max_new_tokens=28) for request in mixed()]
    expected = Expected(wanted)
    options = EngineOptions(6, max_step_tokens=64)
    engine = every().engine(every().config(drafter, expected), backend, options, max_tokens=longest_of(wanted))
    assert decode(engine, wanted) == right(wanted, expected)
    assert engine.report.num_preempted > 0


class BeyondDrafter(PerfectDrafter):
    """Right tokens, and after them an id that is no token's.

    Args:
        beyond: that id.
        vocab_size, num_speculative_tokens, references: see `PerfectDrafter`.
    """

    def __init__(self, beyond: int, *args: Any) -> None:
        super().__init__(*args)
        self.beyond = beyond

    def chain(self, row: Row, limit: int) -> list[int]:
        return [*super().chain(row, limit)[:2], self.beyond, 1]


@pytest.mark.parametrize("beyond", [VOCAB, -1, 2**40])
def test_ids_of_no_token_are_not_believed_where_penalties_read_them(
    beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie on a device, so that nobody can have looked at them before the step."""
    params = SamplingParams(temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.3, seed=5)
    wanted = [Request(str(number), (1, 2, 3, 4), 12, sampling=params) for number in range(3)]
    expected = Expected(wanted)
    texts = right(wanted, expected)
    engine = Engine(
        runner_of(target(), ragged_backend(page_size=3)), BeyondDrafter(beyond, VOCAB, 4, expected), batch_size=3
    )
    monkeypatch.setattr(Draft, "on_host", property(lambda self: False))
    with pytest.warns(PluginWarning, match="outside the target's vocabulary of 11"):
        assert decode(engine, wanted) == texts
    assert engine.drafting.drafters[0].failure
    assert engine.report.num_accepted == 6, "of the only step in which it drafted"
