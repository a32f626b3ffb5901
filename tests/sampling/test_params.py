"""`SamplingParams` say in one sentence what was asked, and what is possible."""

from __future__ import annotations

import math
from typing import Any

import pytest

from emssd.errors import ConfigError
from emssd.sampling import SamplingParams
from tests.support.tiers import looped


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


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    SamplingParams(logit_bias={10: 1.0}).check_vocabulary(11)
    with pytest.raises(ConfigError, match="logit_bias has token 11, but the model's vocabulary has 11 tokens"):
        SamplingParams(logit_bias={10: 1.0, 11: 1.0}).check_vocabulary(11)


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
