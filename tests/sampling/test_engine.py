"""Sampled tokens are those of plain sampling by hand, in float64, whatever drafts, trims, or runs beside them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.decoding.engine import Engine
from emssd.drafting import BudgetPolicy, Draft, Drafter
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Request
from emssd.testing.drafters import PerfectDrafter, RandomDrafter, TreeDrafter
from emssd.testing.models import tiny_model
from emssd.testing.strategies import drafters, policies
from tests.support import sampling as reference
from tests.support.backends import engine_of
from tests.support.draft_models import DRAFT_MODEL_OPTIONS, draft_model_drafter
from tests.support.sampling import params_of_any_kind
from tests.support.tiers import looped, only
from tests.support.trees import TREE_BACKENDS, DecoyDrafter

VOCAB, NUM_NEW = 11, 12
HOT = SamplingParams(temperature=1.5, seed=7)


@cache
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", vocab_size=VOCAB, max_model_len=64, std=0.15))


@cache
def other_model() -> TargetModel:
    """A draft model that is right at times."""
    model = tiny_model("llama", vocab_size=VOCAB, max_model_len=64, std=0.15)
    with torch.no_grad():
        model.lm_head.weight.add_(tiny_model("llama", seed=1, vocab_size=VOCAB, std=0.05).lm_head.weight)
    return TargetModel(model)


@cache
def logits_behind(tokens: tuple[int, ...]) -> list[float]:
    return reference.logits_behind(target().model, tokens)


@cache
def _text(prompt: tuple[int, ...], params: SamplingParams | None, request_id: str, num_new: int) -> tuple[int, ...]:
    tokens, greedy = prompt, SamplingParams(temperature=0.0)
    while len(tokens) < len(prompt) + num_new:
        logits = logits_behind(tokens)
        tokens = (*tokens, reference.choice(logits, params or greedy, tokens, len(prompt), request_id))
    return tokens[len(prompt) :]


class Expected(Mapping[Any, tuple[int, ...]]):
    """The tokens that each request must get, past any EOS, by request id."""

    def __init__(self, requests: Seq[Request]) -> None:
        self._requests = {request.request_id: request for request in requests}

    def __getitem__(self, request_id: Any) -> tuple[int, ...]:
        request = self._requests[request_id]
        return _text(request.prompt_ids, request.sampling, request_id, request.max_new_tokens)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, request: Request) -> tuple[int, ...]:
        tokens = self[request.request_id]
        ends = (place for place, token in enumerate(tokens, start=1) if token in request.eos_token_ids)
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


def decode(engine: Engine, asked: Seq[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.run(asked)}


@settings(max_examples=settings.default.max_examples * 2)
@given(
    asked=requests(),
    data=st.data(),
    backend=st.sampled_from(["ragged-page-3", "ragged-page-1", "paged-page-4", "dense"]),
    batch_size=st.sampled_from([3, 1, 2, 5]),
    max_step_tokens=st.sampled_from([64, 8, 3, 1]),
    max_tokens=st.sampled_from([None, 160, 128]),
    budget=policies(),
)
def test_tokens_are_those_of_sampling_one_row_at_a_time_without_a_draft_or_a_cache(
    asked: list[Request],
    data: st.DataObject,
    backend: str,
    batch_size: int,
    max_step_tokens: int,
    max_tokens: int | None,
    budget: BudgetPolicy,
) -> None:
    expected = Expected(asked)
    kinds, models = sorted(DRAFT_MODEL_OPTIONS), [target(), other_model()]
    of_model = st.builds(draft_model_drafter, st.sampled_from(models), st.sampled_from(kinds), st.just(VOCAB))
    one = drafters(VOCAB, expected, with_trees=True) | of_model
    drafter = data.draw(one | st.lists(one, min_size=2, max_size=2), label="drafter")
    engine = make_engine(
        drafter,
        TREE_BACKENDS[backend],
        batch_size=batch_size,
        max_step_tokens=max_step_tokens,
        max_tokens=max_tokens,
        budget=budget,
    )
    assert decode(engine, asked) == {request.request_id: expected.of(request) for request in asked}


def of_one_prompt(number: int, params: SamplingParams | None = HOT) -> list[Request]:
    return [Request(str(i), (1, 2, 3, 4), 24, sampling=params) for i in range(number)]


@looped("backend", TREE_BACKENDS)
def test_drafts_of_the_sampled_text_are_accepted_as_chains_and_as_trees(backend: str) -> None:
    asked = of_one_prompt(4)
    expected = Expected(asked)
    for drafter in (PerfectDrafter(VOCAB, 5, expected), DecoyDrafter(VOCAB, expected)):
        engine = make_engine(drafter, TREE_BACKENDS[backend])
        assert decode(engine, asked) == dict(expected)
        assert engine.report.num_accepted >= 4 * (23 - 23 // 4)


def test_a_text_depends_on_seed_and_request_and_on_nothing_else() -> None:
    asked = of_one_prompt(3)
    texts = decode(make_engine(RandomDrafter(VOCAB, 4)), asked)
    assert len(set(texts.values())) == 3
    assert decode(make_engine(TreeDrafter(VOCAB, 7, seed=5), batch_size=1), asked[::-1]) == texts
    others = [dataclasses.replace(each, sampling=dataclasses.replace(HOT, seed=8)) for each in asked]
    assert not set(decode(make_engine(RandomDrafter(VOCAB, 4)), others).values()) & set(texts.values())
    assert decode(make_engine(RandomDrafter(VOCAB, 4)), asked[:1]) == {"0": texts["0"]}


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
    asked = of_one_prompt(3, params)
    expected, plain = Expected(asked), Expected(of_one_prompt(3, SamplingParams(temperature=params.temperature)))
    assert dict(expected) != dict(plain), "the penalty does nothing here"
    for drafter in (PerfectDrafter(VOCAB, 6, expected), DecoyDrafter(VOCAB, expected, depth=5)):
        engine = make_engine(drafter)
        assert decode(engine, asked) == dict(expected)
        assert engine.report.num_accepted > 3 * 12


@pytest.mark.parametrize("params", [HOT, SamplingParams(repetition_penalty=1.5)], ids=["noise", "penalty"])
def test_ids_that_the_host_has_not_seen_change_nothing(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = of_one_prompt(3, params)
    expected = Expected(asked)
    texts = dict(expected)
    monkeypatch.setattr(Draft, "on_host", property(lambda self: False))
    assert decode(make_engine(RandomDrafter(VOCAB, 5, expected)), asked) == texts


def test_generate_samples_each_prompt_by_its_place() -> None:
    prompts = [[1, 2, 3], [4], [1, 2, 3]]
    asked = [Request(str(i), tuple(prompt), 15, sampling=HOT) for i, prompt in enumerate(prompts)]
    done = make_engine(RandomDrafter(VOCAB, 4), batch_size=2).generate(prompts, 15, sampling=HOT)
    assert [each.token_ids for each in done] == list(Expected(asked).values())


def test_tokens_that_there_are_not_are_refused_before_anything_runs() -> None:
    engine = make_engine(RandomDrafter(VOCAB, 4))
    with pytest.raises(ConfigError, match="logit_bias has token 11, but the model's vocabulary has 11 tokens"):
        engine.generate([[1]], 3, sampling=SamplingParams(logit_bias={11: 1.0}))
    assert engine.report.num_steps == 0


PROMPT, NUM_ROWS, NUM_PREFIXES = (3, 1, 4, 1), 1500, 3
MODES = {
    "temperature": SamplingParams(temperature=1.3, seed=11),
    "top-k and top-p": SamplingParams(temperature=1.3, top_k=8, top_p=0.95, seed=12),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7, seed=13),
    "penalties": SamplingParams(temperature=1.1, repetition_penalty=1.6, presence_penalty=0.8, seed=14),
}
LIMIT = 1 - 0.01 / (len(MODES) * (2 + NUM_PREFIXES))


def p_value_below(tokens: Seq[int], chances: Seq[float]) -> float:
    """Probability of a G statistic below that of `tokens`, if each comes with its chance. Rare ones are one class."""
    counts = Counter(tokens)
    assert not [token for token in counts if not chances[token]], "a token that cannot be"
    classes = [(float(counts[token]), len(tokens) * chance) for token, chance in enumerate(chances) if chance]
    common = [each for each in classes if each[1] >= 5]
    if rare := [each for each in classes if each[1] < 5]:
        common.append((sum(found for found, _ in rare), sum(expected for _, expected in rare)))
    assert len(common) >= 3
    found, expected = torch.tensor(common, dtype=torch.float64).T
    statistic = 2 * torch.special.xlogy(found, found / expected).sum()
    return float(torch.distributions.Chi2(torch.tensor(len(common) - 1.0, dtype=torch.float64)).cdf(statistic))


@pytest.mark.parametrize("mode", only(MODES, ci=["top-k and top-p", "penalties"]))
def test_tokens_follow_the_targets_law_behind_every_common_prefix(mode: str) -> None:
    """Rows differ by their ids alone. Some tokens are drafted and accepted, others are the target's own."""
    params = MODES[mode]
    asked = [Request(f"row {number}", PROMPT, 3, sampling=params) for number in range(NUM_ROWS)]
    engine = make_engine(TreeDrafter(VOCAB, 8), TREE_BACKENDS["ragged-page-1"], batch_size=64, max_step_tokens=512)
    texts = list(decode(engine, asked).values())
    assert NUM_ROWS / 5 < engine.report.num_accepted < NUM_ROWS
    firsts = Counter(text[0] for text in texts)
    pairs = Counter(text[:2] for text in texts)
    beginnings = [(), *((token,) for token, _ in firsts.most_common(NUM_PREFIXES)), pairs.most_common(1)[0][0]]
    for beginning in beginnings:
        prefix, place = (*PROMPT, *beginning), len(beginning)
        scores = reference.scores(logits_behind(prefix), params, prefix, len(PROMPT))
        tokens = [text[place] for text in texts if text[:place] == beginning]
        assert p_value_below(tokens, reference.probabilities(scores)) < LIMIT, beginning
