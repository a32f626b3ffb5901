"""`model.generate(..., custom_generate=emssd.custom_generate)` gives what `model.generate(do_sample=False)` gives.

`test_hf_sampling.py` has `do_sample=True`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_llma import LLMAConfig, Search
from emssd_padded import PaddedConfig
from emssd_testing.models import tiny_model
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, TextStreamer
from transformers.generation import (
    ConfidenceCriteria,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

import emssd
from emssd.attention import PagedBackend
from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError, PluginWarning
from tests.support.tiers import looped

PAD = 0
PROMPTS = ([3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3], [8], [9, 10, 11, 9, 10], [4, 4, 4, 4, 12, 4, 4])
LLMA = LLMAConfig(match_length=1, copy_length=4, search=Search.prompt_and_output, require_full_copy=False)


def left_padded(prompts: tuple[list[int], ...] = PROMPTS) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def make_model(architecture: str = "llama", **options: Any) -> PreTrainedModel:
    return tiny_model(architecture, vocab_size=13, max_model_len=64, **options)


def both(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], ours: dict[str, Any] | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `generate` without emssd and with it."""
    options = {"max_new_tokens": 20, "do_sample": False} | options
    drafting: dict[str, Any] = {"drafter": LLMA} | (ours or {})
    theirs = model.generate(**inputs, **options)
    return theirs, model.generate(**inputs, **options, custom_generate=emssd.custom_generate, **drafting)


@pytest.mark.parametrize(
    ("backend", "budget"), [("ragged", "adaptive"), (PaddedConfig(), "fixed")], ids=["ragged", "padded"]
)
@pytest.mark.parametrize("drafter", ["llma", LLMA, "none"], ids=["llma", "llma_everywhere", "none"])
# Not gemma2: Transformers' eager attention in float64 gives NaN in padded rows, as it takes a softmax in float32.
@pytest.mark.parametrize("architecture", ["opt", "llama", "mistral", "gpt2"])
def test_a_batch_padded_on_the_left_gives_the_same_tensor(
    architecture: str, drafter: Any, backend: Any, budget: str
) -> None:
    choices = {"drafter": drafter, "backend": backend, "budget": budget}
    expected, got = both(make_model(architecture), left_padded(), choices)
    assert torch.equal(expected, got)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_whose_layers_keep_a_state_and_know_no_longest_text_give_the_same_tensor() -> None:
    """`generate` hands them an empty cache of their own."""
    inputs = {"input_ids": torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])}
    expected, got = both(make_model("mamba2"), inputs, max_new_tokens=8)
    assert torch.equal(expected, got)


def test_a_model_that_accelerate_has_wrapped_for_mixed_precision_is_decoded_in_that_of_its_weights() -> None:
    model = make_model().float()
    expected = model.generate(**left_padded(), max_new_tokens=9)
    model._original_forward, model.forward = model.forward, torch.autocast("cpu", torch.bfloat16)(model.forward)
    got = model.generate(**left_padded(), max_new_tokens=9, custom_generate=emssd.custom_generate)
    assert torch.equal(expected, got)


def test_the_result_is_int64_whatever_the_ids_are() -> None:
    inputs = {name: value.int() for name, value in left_padded().items()}
    expected, got = both(make_model(), inputs, max_new_tokens=3)
    assert torch.equal(expected, got)
    assert got.dtype is expected.dtype is torch.int64


def test_without_a_pad_token_the_first_eos_token_pads() -> None:
    model = make_model(seed=1)
    model.generation_config.pad_token_id = None
    expected, got = both(model, left_padded(), eos_token_id=[9, 5, 7])
    assert (expected[:, -1] == 9).any()
    assert torch.equal(expected, got)


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": None},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 25},
        {"max_new_tokens": None},  # Transformers' own default
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"output_scores": True},  # no effect without return_dict_in_generate
        {"top_k": 5, "temperature": 0.5},  # no effect without do_sample
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0},
        {"min_new_tokens": 0},
        {"min_length": 3},  # less than the inputs
        {"output_attentions": True},  # as output_scores
        {"output_hidden_states": True},
        {"renormalize_logits": True},
        {"repetition_penalty": 1.8},
        {"suppress_tokens": [5, 7]},
        {"sequence_bias": {(5,): -9.0, (6,): 0.3}, "repetition_penalty": 1.3},
        {"sequence_bias": [[[5], -9.0]]},
        {"bad_words_ids": [[5], [9], [12]], "eos_token_id": [9]},  # Transformers never forbids EOS
        {"max_time": 3600.0},
        {"max_time": 0.0},  # HF and we end every row with its first token
        {"max_time": 0.0, "eos_token_id": None},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)])},
    ],
    ids=lambda options: "a MaxTimeCriteria" if "stopping_criteria" in options else str(options),
)
def test_options_of_greedy_decoding_give_the_same_tensor(options: dict[str, Any]) -> None:
    expected, got = both(make_model(), left_padded(), **options)
    assert torch.equal(expected, got)


def test_a_generation_config_object_and_the_models_own_are_followed() -> None:
    model = make_model(seed=1)
    config = GenerationConfig(max_new_tokens=7, eos_token_id=[5, 9], pad_token_id=PAD, do_sample=False)
    inputs = left_padded()
    expected = model.generate(**inputs, generation_config=config)
    got = model.generate(**inputs, generation_config=config, custom_generate=emssd.custom_generate)
    assert torch.equal(expected, got)
    model.generation_config = config
    assert torch.equal(expected, model.generate(**inputs, custom_generate=emssd.custom_generate, drafter=LLMA))


@pytest.mark.parametrize("criteria", [[MaxLengthCriteria(14)], [EosTokenCriteria(5)], [EosTokenCriteria([7, 9])]])
def test_a_callers_own_length_and_eos_criteria_are_followed(criteria: list[Any]) -> None:
    options = {"stopping_criteria": StoppingCriteriaList(criteria), "pad_token_id": PAD}
    expected, got = both(make_model(seed=1), left_padded(), **options)
    assert torch.equal(expected, got)


class TestTheModelAfterwards:
    def test_is_as_before_also_when_a_drafter_or_attention_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Failing(Drafter):
            num_speculative_tokens = 1

            def propose(self, batch: Any, budget: Any) -> Draft:
                raise RuntimeError("no idea")

        model = make_model()
        before, alone = model.config._attn_implementation, model.generate(**left_padded(), max_new_tokens=9)
        kwargs: dict[str, Any] = {"custom_generate": emssd.custom_generate, "drafter": Failing()}
        with pytest.warns(PluginWarning, match="no idea"):
            ours = model.generate(**left_padded(), max_new_tokens=9, **kwargs)
        assert torch.equal(ours, alone)
        monkeypatch.setattr(PagedBackend, "forward", Mock(side_effect=MemoryError("out of memory")))
        with pytest.raises(MemoryError):
            model.generate(**left_padded(), max_new_tokens=9, custom_generate=emssd.custom_generate)
        assert model.config._attn_implementation == before != "emssd"
        assert torch.equal(model.generate(**left_padded(), max_new_tokens=9), alone)

    def test_is_in_training_again_module_by_module(self) -> None:
        model = make_model("gpt2")
        model.train()
        model.transformer.h[0].eval()
        expected = [module.training for module in model.modules()]
        model.generate(**left_padded(), max_new_tokens=3, custom_generate=emssd.custom_generate)
        assert [module.training for module in model.modules()] == expected

    def test_can_be_trained(self) -> None:
        model = make_model()
        model.generate(**left_padded(), max_new_tokens=3, custom_generate=emssd.custom_generate)
        ids = torch.tensor([[3, 4, 5]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert model.lm_head.weight.grad is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "dola": ({"dola_layers": "low"}, "dola_layers=low"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1"),
    "dict": ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate=True"),
    "bad words": ({"bad_words_ids": [[5], [5, 6]]}, r"bad_words_ids for single tokens, and \[5, 6\] is a sequence"),
    "min_length": ({"min_length": 15}, "MinLength"),
    "min_new_tokens": ({"min_new_tokens": 3}, "MinNewTokens"),
    "prefix": ({"prefix_allowed_tokens_fn": lambda *_: [3, 4]}, "PrefixConstrained"),
    "forced bos": ({"forced_bos_token_id": 4}, "forced_bos_token_id=4"),
    "forced eos": ({"forced_eos_token_id": 0}, "forced_eos_token_id=0"),
    "invalid values": ({"remove_invalid_values": True}, "remove_invalid_values=True"),
    "decay": ({"exponential_decay_length_penalty": (2, 1.5)}, "exponential_decay_length_penalty="),
    "begin suppress": ({"begin_suppress_tokens": [5]}, r"begin_suppress_tokens=\[5\]"),
    "bias": ({"sequence_bias": {(5, 6): -9.0}}, r"sequence_bias for single tokens, and \[5, 6\]"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    "watermark": ({"watermarking_config": {"bias": 2.5}}, "watermarking_config="),
    "processor": ({"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(2.0)])}, "TemperatureLogits"),
    "criterion": ({"stopping_criteria": StoppingCriteriaList([ConfidenceCriteria(0.5)])}, "ConfidenceCriteria"),
    "stop strings": ({"stop_strings": ["a"], "tokenizer": object()}, "pass it as draft_tokenizer="),
    "no stop string": ({"stop_strings": []}, r"stop_strings are \[\]"),
    "stop strings of numbers": ({"stop_strings": 5}, "stop_strings are 5; give texts of at least one character"),
    "a tokenizer's name": ({"draft_tokenizer": "x"}, "draft_tokenizer is 'x'; give the tokenizer itself"),
    "drafters by name": ({"drafter": ["suffix"]}, r"drafter is \['suffix'\]; a list holds instances of Drafter"),
    "no drafters": ({"drafter": []}, r"drafter is \[\]; a list holds instances"),
    "no rows": ({"input_ids": torch.ones(0, 11).long(), "attention_mask": None}, r"not {'input_ids': \[0, 11\]"),
    "no tokens": ({"input_ids": torch.ones(1, 0).long(), "attention_mask": None}, r"not {'input_ids': \[1, 0\]"),
    "a wide mask": ({"attention_mask": torch.zeros(4, 12).long()}, r"'attention_mask': \[4, 12\]"),
    "a wide mask of ones": ({"attention_mask": torch.ones(4, 12).long()}, r"'position_ids': \[4, 12\]"),
    "empty stop string": ({"stop_strings": ["a", ""]}, "texts of at least one character"),
    "positions": ({"position_ids": torch.arange(11).expand(4, -1)}, "position_ids"),
    "cache": ({"past_key_values": DynamicCache()}, "past_key_values|out cache"),
    "segments": ({"token_type_ids": torch.ones(4, 11, dtype=torch.int64)}, "token_type_ids"),
    "padding right": ({"attention_mask": (torch.arange(11) != 10).long().expand(4, -1)}, "padded on th"),
    "padding within": ({"attention_mask": (torch.arange(11) != 5).long().expand(4, -1)}, "padded on th"),
    "padding alone": ({"attention_mask": torch.zeros(4, 11).long()}, "padded on the left"),
    "embeddings": ({"inputs_embeds": torch.ones(4, 11, 32, dtype=torch.float64)}, "inputs_embeds"),
}


@looped("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_name(name: str) -> None:
    options, reason = REFUSED[name]
    model = make_model("gpt2")
    with pytest.raises(ConfigError, match=reason):
        model.generate(**left_padded() | {"max_new_tokens": 9} | options, custom_generate=emssd.custom_generate)
    assert model.config._attn_implementation != "emssd"


def test_more_new_tokens_than_the_model_takes_are_refused_instead_of_cut_off() -> None:
    model = make_model()
    options: dict[str, Any] = {"eos_token_id": None, "custom_generate": emssd.custom_generate}
    with pytest.raises(ConfigError, match="a prompt of 11 tokens and 54 new ones are more than the 64"):
        model.generate(**left_padded(), max_new_tokens=54, **options)
    assert model.generate(**left_padded(), max_new_tokens=53, **options).shape == (4, 64)


def test_what_transformers_keeps_from_custom_functions_changes_no_token() -> None:
    model = make_model("opt")
    plain = model.generate(**left_padded(), max_new_tokens=9)
    assisted = model.generate(
        **left_padded(), max_new_tokens=9, assistant_model=make_model("opt"), custom_generate=emssd.custom_generate
    )
    assert torch.equal(assisted, plain)

    class Silent(TextStreamer):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: Any) -> None:
            self.seen.append(value)

        def end(self) -> None:
            self.seen.append("end")

    one = {name: value[:1] for name, value in left_padded().items()}
    ours, theirs = Silent(), Silent()
    streamed = model.generate(**one, max_new_tokens=9, streamer=ours, custom_generate=emssd.custom_generate)
    assert torch.equal(streamed, model.generate(**one, max_new_tokens=9, streamer=theirs))
    assert [str(each) for each in ours.seen] == [str(each) for each in theirs.seen]  # of tensors, their numbers
    with pytest.raises(ConfigError):
        model.generate(**one, num_beams=2, streamer=(failed := Silent()), custom_generate=emssd.custom_generate)
    assert failed.seen[1:] == ["end"]


def test_padding_that_transformers_counts_as_text_is_refused_where_it_makes_a_difference() -> None:
    model, options = make_model(), {"no_repeat_ngram_size": 3}
    expected, got = both(model, left_padded(), suppress_tokens=[PAD], **options)
    assert torch.equal(expected, got)
    for prompts, more in (((PROMPTS[0], [PAD, 3]), options), (PROMPTS, {"no_repeat_ngram_size": 1})):
        with pytest.raises(ConfigError, match="Transformers counts padding for no_repeat_ngram_size="):
            both(model, left_padded(prompts), **more)
    likely = {"sequence_bias": {(PAD,): 9.0}}
    with pytest.raises(ConfigError, match="a row with its padding's token in its text would differ"):
        both(model, left_padded(), eos_token_id=None, **likely, **options)
