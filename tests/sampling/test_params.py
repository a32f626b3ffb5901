"""Sampling parameters, the noise that they seed, and the samples of one prompt."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from emssd_testing.drafters import RandomDrafter, TreeDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Drafter
from emssd.errors import ConfigError
from emssd.sampling import SamplingParams
from emssd.sampling.noise import gumbel, hashed, noise_key, noise_state
from emssd.sequences import Request
from tests.sampling.test_engine import HOT, VOCAB, make_engine, target
from tests.support import sampling as reference
from tests.support.backends import BACKENDS, engine_of
from tests.support.tiers import looped
from tests.support.trees import TREE_BACKENDS


@looped(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be 0 or at least 1e-06"),
        ({"temperature": 1e-9}, "temperature is 1e-09; it must be 0 or"),
        ({"temperature": math.nan}, "temperature is nan; it must be"),
        ({"temperature": math.inf}, "temperature is inf; it must be"),
        ({"temperature": True}, "temperature is True; it must be"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be"),
        ({"top_p": 0}, "top_p is 0; it must be above 0, and at most 1"),
        ({"top_p": 2}, "top_p is 2; it must be above 0, and at most 1"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number of at least 0, which is off"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number of at least 0"),
        ({"min_p": 1.01}, "min_p is 1.01; it must be from 0 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be from 0 to 1"),
        ({"typical_p": 0.0}, "typical_p is 0.0; it must be above 0"),
        ({"typical_p": 0.5, "temperature": 0}, "typical_p is 0.5 at temperature 0, which takes the most probable"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be above 0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf; it must be a finite number"),
        ({"frequency_penalty": None}, "frequency_penalty is None; it must be a finite number"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size is -2; it must be a whole number of at least 0"),
        ({"seed": 1.0}, "seed is 1.0; it must be a whole number"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"n": 0}, "n is 0; it must be a whole number of at least 1"),
        ({"n": 2.0}, "n is 2.0; it must be a whole number of at least 1"),
        ({"n": 3, "temperature": 0}, "n is 3 at temperature 0, which would give 3 equal texts; raise temperature, or"),
        ({"logprobs": -1}, "logprobs is -1; it must be a whole number of at least 0, or None, which is off"),
        ({"logprobs": True}, "logprobs is True; it must be a whole number of at least 0"),
        ({"logit_bias": [1, 2]}, "logit_bias is .1, 2.; it must map token ids to numbers"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias has a token id -1; it must be a whole number of at least 0"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias has a token id '1'; it must be a whole number"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf; it must be a finite number, or -inf"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SamplingParams(**options)


def test_bounds_are_possible() -> None:
    SamplingParams(temperature=1e-6, top_p=1, min_p=1, typical_p=1, seed=-(2**80), logit_bias={0: -math.inf})
    SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1)


def test_more_of_the_most_probable_tokens_than_there_are_is_refused() -> None:
    SamplingParams(logprobs=11).check_vocabulary(11)
    with pytest.raises(ConfigError, match="logprobs is 12, but the model's vocabulary has 11 tokens"):
        SamplingParams(logprobs=12).check_vocabulary(11)


def test_only_what_changes_nothing_is_greedy() -> None:
    assert SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1, seed=4, logprobs=2).is_greedy
    others = ({"temperature": 0.1}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 0.1}}, {"presence_penalty": 0.1})
    others += ({"frequency_penalty": -0.1}, {"no_repeat_ngram_size": 4})
    for other in others:
        assert not SamplingParams(**({"temperature": 0} | other)).is_greedy


def test_params_are_values_that_nobody_changes_from_outside() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params == SamplingParams(logit_bias={3: 1.0})
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}))
    assert params != SamplingParams(logit_bias={3: 2.0})
    assert params.processing == SamplingParams(logit_bias={3: 1.0}, seed=5, n=2, logprobs=1).processing
    assert params.processing != SamplingParams(logit_bias={3: 2.0}).processing
    with pytest.raises(TypeError):
        params.logit_bias[5] = 100.0  # type: ignore[index]  # as a drafter might
    for again in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), copy.copy(params)):
        assert again == params


CPU = torch.device("cpu")

WHERE = st.tuples(st.integers(-(2**70), 2**70), st.text(), st.integers(0, 2**40))


@given(st.lists(WHERE, min_size=1, max_size=4), st.integers(1, 300))
def test_bits_are_those_of_the_hash_in_python(places: list[tuple[int, str, int]], vocab_size: int) -> None:
    states = [noise_state(noise_key(seed, request_id), position) for seed, request_id, position in places]
    bits = hashed(states, vocab_size, CPU)
    assert bits.tolist() == [[reference.hashed(*point, token) for token in range(vocab_size)] for point in places]


def test_bits_are_written_down() -> None:
    """So that a change of the hash, which would change every text, cannot go unseen."""
    assert noise_key(7, "a") == 0x490824F513A1AAA4
    assert noise_state(0x490824F513A1AAA4, 3) == 0x0420E940BAB6377B
    assert hashed([0x0420E940BAB6377B], 3, CPU).tolist() == [[3294546313, 2224496003, 1202606225]]


@pytest.mark.parametrize("bits", [0, 1, 2**32 - 2, 2**32 - 1])
def test_extreme_bits_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emssd.sampling.noise.hashed", lambda *_: torch.tensor([[bits]]))
    assert float(gumbel([0], 1, CPU)) == pytest.approx(reference.gumbel(bits), rel=1e-9)
    assert math.isfinite(reference.gumbel(bits))


def test_seed_request_sample_position_and_token_all_count() -> None:
    keys = {
        noise_key(seed, name, sample)
        for seed in (0, 1, -1, 11)
        for name in ("", "0", "1", "é\ud800")
        for sample in (0, 1)
    }
    assert len(keys) == 4 * 4 * 2
    states = {noise_state(key, position) for key in keys for position in range(200)}
    assert len(states) == len(keys) * 200
    bits = hashed(sorted(states)[:64], 500, CPU)
    assert len(set(bits.flatten().tolist())) > 64 * 500 - 10  # by chance, two of 32,000 in 2^32 are equal


def test_noise_has_gumbels_law() -> None:
    """Over tokens, positions and seeds, by chi-squared: the shares in ten parts that are equally probable."""
    along_tokens = gumbel([noise_state(noise_key(0, "0"), 0)], 100_000, CPU)[0]
    along_positions = gumbel([noise_state(noise_key(0, "0"), position) for position in range(100_000)], 1, CPU)[:, 0]
    along_seeds = gumbel([noise_state(noise_key(seed, "0"), 9) for seed in range(100_000)], 4, CPU)[:, 3]
    for noise in (along_tokens, along_positions, along_seeds):
        counts = torch.histc(torch.exp(-torch.exp(-noise)), bins=10, min=0, max=1)
        assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 27.9  # one in a thousand; the seeds are fixed


PROMPTS = [(1, 2, 3, 4), (5,), (1, 2, 3, 4)]
FOUR = dataclasses.replace(HOT, n=4)


@cache
def by_hand(prompt: tuple[int, ...], request_id: str, sample: int, num_new: int = 12) -> tuple[int, ...]:
    return reference.sampled(target().model, prompt, num_new, HOT, request_id, sample=sample)


@pytest.mark.parametrize("backend", TREE_BACKENDS)
@pytest.mark.parametrize("drafter", [RandomDrafter(VOCAB, 4), TreeDrafter(VOCAB, 6, seed=1)], ids=["chains", "trees"])
def test_they_are_told_apart_by_number_and_stand_behind_one_another(backend: str, drafter: Drafter) -> None:
    done = make_engine(drafter, TREE_BACKENDS[backend], batch_size=5).generate(PROMPTS, 12, sampling=FOUR)
    places = [(prompt, str(i), sample) for i, prompt in enumerate(PROMPTS) for sample in range(4)]
    assert [(row.prompt_ids, row.request_id, row.sample) for row in done] == places
    assert [row.token_ids for row in done] == [by_hand(*point) for point in places]
    assert len({row.token_ids for row in done}) == len(done)
    assert {row.seed for row in done} == {HOT.seed}


def test_preempted_ones_go_on_with_the_same_text() -> None:
    engine = make_engine(RandomDrafter(VOCAB, 5), batch_size=5, max_tokens=63)
    done = engine.generate([(1, 2, 3, 4)], 24, sampling=dataclasses.replace(HOT, n=5))
    assert engine.report.num_preempted
    assert [row.token_ids for row in done] == [by_hand((1, 2, 3, 4), "0", sample, 24) for sample in range(5)]


@looped(("length", "shared"), [(40, 32), (32, 16), (33, 32), (15, 0)])
def test_all_start_together_and_the_prompts_whole_pages_are_computed_once(length: int, shared: int) -> None:
    """The last token of a prompt is always computed, as its logits are wanted: of 32 tokens 16 are shared."""
    backend, prompt = BACKENDS["ragged-page-16"](), tuple(token % VOCAB for token in range(length))
    engine = engine_of(target(), RandomDrafter(VOCAB, 3), backend, 8, max_step_tokens=512, prefix_caching=True)
    done = engine.generate([prompt], 4, sampling=dataclasses.replace(HOT, n=6))
    assert engine.report.num_adopted_tokens == 5 * shared
    assert [row.token_ids for row in done] == [by_hand(prompt, "0", sample, 4) for sample in range(6)]


def test_whoever_drives_the_loop_gets_all_of_them() -> None:
    engine, ended = make_engine(RandomDrafter(VOCAB, 3)), {}
    engine.add(Request("a", (1, 2), 5, sampling=dataclasses.replace(HOT, n=3)))
    while engine.has_work:
        ended |= {(row.request.prompt_id, row.request.sample): tuple(row.output_ids) for row in engine.step()}
    assert ended == {("a", sample): by_hand((1, 2), "a", sample, 5) for sample in range(3)}


def test_a_request_that_is_called_like_a_sample_is_refused() -> None:
    engine = make_engine(RandomDrafter(VOCAB, 3))
    wanted = [Request("a", (1,), 2, sampling=FOUR), Request("a#1", (1,), 2)]
    with pytest.raises(ConfigError, match="two requests have the same request_id 'a#1'"):
        engine.run(wanted)
    engine.add(wanted[1])
    with pytest.raises(ConfigError, match="request 'a#1' is there already"):
        engine.add(wanted[0])
    assert engine.scheduler.num_waiting == 1
