"""`custom_generate` with `do_sample=True`: drawn as by hand from the config's options, and no option is ignored."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_llma import LLMAConfig, Search
from emssd_testing.models import tiny_model
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import emssd
from emssd.errors import ConfigError
from emssd.integrations import generate_options
from emssd.sampling import SamplingParams
from tests.support.sampling import sampled
from tests.support.tiers import looped

VOCAB, PAD, NUM_NEW = 71, 0, 12  # more tokens than Transformers' top_k leaves by default
PROMPTS = ((3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3), (8,), (9, 10, 11, 9, 10))
LLMA = LLMAConfig(match_length=1, copy_length=4, search=Search.prompt_and_output, require_full_copy=False)


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=VOCAB, max_model_len=64, std=0.15)


def generated(**options: Any) -> torch.Tensor:
    """``[B, new]`` what is drawn for the prompts, padded on the left."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    options = {"do_sample": True, "eos_token_id": None, "pad_token_id": PAD, "drafter": LLMA} | options
    ours = {"max_new_tokens": NUM_NEW, "custom_generate": emssd.custom_generate}
    return model().generate(input_ids=ids, attention_mask=mask, **ours, **options)[:, width:]


def by_hand(params: SamplingParams, num_samples: int = 1, eos: tuple[int, ...] = ()) -> list[list[int]]:
    rows = [
        sampled(model(), prompt, NUM_NEW, params, str(place), eos, sample)
        for place, prompt in enumerate(PROMPTS)
        for sample in range(num_samples)
    ]
    width = max(map(len, rows))
    return [[*row, *[PAD] * (width - len(row))] for row in rows]


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, {"top_k": 50}),
        ({"top_k": 0}, {}),
        ({"top_k": 3, "temperature": 0.8}, {"top_k": 3, "temperature": 0.8}),
        ({"top_p": 0.7, "temperature": 2.0}, {"top_k": 50, "top_p": 0.7, "temperature": 2.0}),
        ({"top_k": 0, "min_p": 0.1}, {"min_p": 0.1}),
        ({"top_k": 0, "typical_p": 0.5}, {"typical_p": 0.5}),
        ({"top_k": 0, "repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"top_k": 2, "no_repeat_ngram_size": 2}, {"top_k": 2, "no_repeat_ngram_size": 2}),
        ({"top_k": 4, "suppress_tokens": [5, 8]}, {"top_k": 4, "logit_bias": {5: float("-inf"), 8: float("-inf")}}),
        ({"top_k": 4, "sequence_bias": {(5,): 4.0}}, {"top_k": 4, "logit_bias": {5: 4.0}}),
        ({"top_k": 4, "bad_words_ids": [[6]]}, {"top_k": 4, "logit_bias": {6: float("-inf")}}),
        ({"top_k": 0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "renormalize_logits": True}, {}),
    ],
    ids=str,
)
def test_options_of_the_config_are_honoured(options: dict[str, Any], params: dict[str, Any]) -> None:
    expected = by_hand(SamplingParams(**params, seed=7))
    assert generated(seed=7, **options).tolist() == expected
    assert expected != by_hand(SamplingParams(seed=7)) or options in ({}, {"top_k": 0}) or "epsilon_cutoff" in options


def test_several_sequences_of_a_prompt_follow_one_another() -> None:
    params = SamplingParams(temperature=1.3, top_k=50, seed=3)
    expected = by_hand(params, 3, eos=(5, 9, 20))
    assert any(row[-1] == PAD for row in expected)
    options = {"seed": 3, "temperature": 1.3, "eos_token_id": [5, 9, 20]}
    assert generated(num_return_sequences=3, **options).tolist() == expected
    first = by_hand(params, 1, eos=(5, 9, 20))
    assert generated(**options).tolist() == first
    assert generated(drafter="none", backend="padded", **options).tolist() == first


def test_rows_that_go_on_past_a_time_that_is_over_are_of_one_length() -> None:
    assert generated(seed=3, max_time=0.0).tolist() == [row[:1] for row in by_hand(SamplingParams(top_k=50, seed=3))]


class TestTheSeed:
    def test_comes_from_pytorchs_own_generator(self) -> None:
        torch.manual_seed(5)
        first, second = generated(), generated()
        torch.manual_seed(5)
        assert torch.equal(generated(), first)
        assert torch.equal(generated(), second)
        assert not torch.equal(first, second)

    def test_can_be_given_and_leaves_that_generator_alone(self) -> None:
        torch.manual_seed(5)
        state = torch.get_rng_state()
        first = generated(seed=11)
        generated(do_sample=False)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(generated(seed=11), first)
        assert not torch.equal(generated(seed=12), first)

    def test_is_a_whole_number(self) -> None:
        with pytest.raises(ConfigError, match=r"^seed is 1.5; it must be a whole number"):
            generated(seed=1.5)


def config(**values: Any) -> Any:
    """As `generate` hands it over, with nothing set but `values`."""
    nothing = dict.fromkeys(vars(GenerationConfig()))
    return SimpleNamespace(**nothing | {"do_sample": True} | values)


FREE = generate_options.HONOURED | generate_options.HARMLESS | {"top_h", "epsilon_cutoff", "eta_cutoff"}


@looped("name", sorted(name for name in {*vars(GenerationConfig())} - FREE if not name.startswith("_")))
def test_a_field_that_cannot_be_honoured_is_refused_unless_it_is_neutral(name: str) -> None:
    for value in (False, *generate_options.NEUTRAL.get(name, ())):
        generate_options.check_config(config(**{name: value}))
    for sampling in (True, False):
        with pytest.raises(ConfigError, match=rf"cannot honour {name}=odd; leave it out, or call generate without"):
            generate_options.check_config(config(**{name: "odd", "do_sample": sampling}))


@pytest.mark.parametrize(("name", "value"), [("top_h", 0.4), ("epsilon_cutoff", 0.1), ("eta_cutoff", 0.1)])
def test_what_only_sampling_follows_is_refused_there(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"cannot honour {name}={value}"):
        generated(**{name: value})
    assert torch.equal(generated(do_sample=False, **{name: value}), generated(do_sample=False))


def test_a_field_that_nobody_knows_is_refused_and_a_models_own_remark_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    generate_options.check_config(config(chat_format="chatml"))
    monkeypatch.setattr(generate_options, "HARMLESS", generate_options.HARMLESS - {"low_memory"})
    with pytest.raises(ConfigError, match="cannot honour low_memory=True"):
        generate_options.check_config(config(low_memory=True))


@looped(
    ("processor", "options"),
    [
        (TemperatureLogitsWarper(2.0), {}),
        (TemperatureLogitsWarper(2.0), {"temperature": 2.0}),  # beside that of the config: both would count
        (TopKLogitsWarper(5), {}),
        (MinPLogitsWarper(0.1), {"do_sample": False}),
        (RepetitionPenaltyLogitsProcessor(1.5), {"repetition_penalty": 1.2}),
        (RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2), {"repetition_penalty": 1.5}),
        (RepetitionPenaltyLogitsProcessor(1.5), {"repetition_penalty": 1.5}),  # on padding, too
    ],
)
def test_processors_of_the_callers_own_are_refused(processor: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"these were asked for: {type(processor).__name__}"):
        generated(logits_processor=LogitsProcessorList([processor]), **options)


def test_processors_that_do_what_the_config_says_are_none_of_the_callers_own() -> None:
    padding = torch.tensor([max(map(len, PROMPTS)) - len(prompt) for prompt in PROMPTS])
    own = LogitsProcessorList([LogitNormalization(), RepetitionPenaltyLogitsProcessor(1.5, padding)])
    params = SamplingParams(repetition_penalty=1.5, top_k=50, seed=2)
    assert generated(logits_processor=own, repetition_penalty=1.5, seed=2).tolist() == by_hand(params)


@looped(
    ("options", "message"),
    [
        ({"top_p": 0.0}, r"^top_p is 0.0; it must be above 0"),
        ({"suppress_tokens": [VOCAB]}, "logit_bias has token 71, but the model's vocabulary has 71 tokens"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generated(**options)
