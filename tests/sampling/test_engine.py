"""Sampled tokens are those of plain sampling by hand, in float64, whatever drafts, trims, or runs beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, TreeDrafter
from emssd_testing.models import tiny_model
from hypothesis import strategies as st

from emssd.decoding.engine import Engine
from emssd.drafting import BudgetPolicy, Drafter
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Request
from tests.support.backends import engine_of
from tests.support.sampling import kept_text, params_of_any_kind
from tests.support.tiers import looped
from tests.support.trees import TREE_BACKENDS, DecoyDrafter

VOCAB, NUM_NEW = 11, 12
HOT = SamplingParams(temperature=1.5, seed=7)


@cache
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", vocab_size=VOCAB, max_model_len=64, std=0.15))


class Expected(Mapping[Any, tuple[int, ...]]):
    """The tokens that each request must get, past any EOS, by request id."""

    def __init__(self, requests: Seq[Request]) -> None:
        self._requests = {request.request_id: request for request in requests}

    def __getitem__(self, request_id: Any) -> tuple[int, ...]:
        request = self._requests[request_id]
        return kept_text(target().model, request.prompt_ids, request.max_new_tokens, request.sampling, request_id)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, request: Request) -> tuple[int, ...]:
        tokens = self[request.request_id]
        ends = (end for end, token in enumerate(tokens, start=1) if token in request.eos_token_ids)
        return tokens[: next(ends, len(tokens))]


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Requests with prompts alike and different, and with params of their own or shared, some with the same seed."""
    texts = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=3))
    kinds = draw(st.lists(st.none() | params_of_any_kind(VOCAB), min_size=1, max_size=2))
    found = []
    for number in range(draw(st.integers(1, 5))):
        length, eos = (
            draw(st.sampled_from([NUM_NEW, NUM_NEW, 1, 5])),
            draw(st.frozensets(st.integers(0, 10), max_size=1)),
        )
        prompt, params = tuple(draw(st.sampled_from(texts))), draw(st.sampled_from(kinds))
        found.append(Request(f"r{number}", prompt, length, eos, None, params))
    return draw(st.permutations(found))


def make_engine(
    drafter: Drafter | Seq[Drafter],
    make_backend: Any = TREE_BACKENDS["ragged-page-3"],
    *,
    budget: BudgetPolicy | None = None,
    **options: Any,
) -> Engine:
    return engine_of(target(), drafter, make_backend(), budget=budget or FixedBudget(), trees=True, **options)


def decode(engine: Engine, wanted: Seq[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.run(wanted)}


def of_one_prompt(number: int, params: SamplingParams | None = HOT) -> list[Request]:
    return [Request(str(i), (1, 2, 3, 4), 24, sampling=params) for i in range(number)]


@looped("backend", TREE_BACKENDS)
def test_drafts_of_the_sampled_text_are_accepted_as_chains_and_as_trees(backend: str) -> None:
    wanted = of_one_prompt(4)
    expected = Expected(wanted)
    for drafter in (PerfectDrafter(VOCAB, 5, expected), DecoyDrafter(VOCAB, expected)):
        engine = make_engine(drafter, TREE_BACKENDS[backend])
        assert decode(engine, wanted) == dict(expected)
        assert engine.report.num_accepted >= 4 * (23 - 23 // 4)


def test_a_text_depends_on_seed_and_request_and_on_nothing_else() -> None:
    wanted = of_one_prompt(3)
    texts = decode(make_engine(RandomDrafter(VOCAB, 4)), wanted)
    assert len(set(texts.values())) == 3
    assert decode(make_engine(TreeDrafter(VOCAB, 7, seed=5), batch_size=1), wanted[::-1]) == texts
    others = [dataclasses.replace(request, sampling=dataclasses.replace(HOT, seed=8)) for request in wanted]
    assert not set(decode(make_engine(RandomDrafter(VOCAB, 4)), others).values()) & set(texts.values())
    assert decode(make_engine(RandomDrafter(VOCAB, 4)), wanted[:1]) == {"0": texts["0"]}


@looped(
    "params",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.8),
        SamplingParams(temperature=0.0, no_repeat_ngram_size=2),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(temperature=0.0, frequency_penalty=0.7),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5),
    ],
)
def test_penalties_see_the_tokens_of_the_draft_on_the_way_to_a_node(params: SamplingParams) -> None:
    wanted = of_one_prompt(3, params)
    expected, plain = Expected(wanted), Expected(of_one_prompt(3, SamplingParams(temperature=params.temperature)))
    assert dict(expected) != dict(plain), "the penalty does nothing here"
    for drafter in (PerfectDrafter(VOCAB, 6, expected), DecoyDrafter(VOCAB, expected, depth=5)):
        engine = make_engine(drafter)
        assert decode(engine, wanted) == dict(expected)
        assert engine.report.num_accepted > 3 * 12


def test_tokens_that_there_are_not_are_refused_before_anything_runs() -> None:
    engine = make_engine(RandomDrafter(VOCAB, 4))
    with pytest.raises(ConfigError, match="logit_bias has token 11, but the model's vocabulary has 11 tokens"):
        engine.generate([[1]], 3, sampling=SamplingParams(logit_bias={11: 1.0}))
    assert engine.report.num_steps == 0
