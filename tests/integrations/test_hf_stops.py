"""Stop strings and a time end the rows of `emssd.custom_generate` where those of `model.generate` end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import StoppingCriteriaList, StopStringCriteria, stopping_criteria

import emssd

from .test_hf_adapter import LLMA, PAD, PROMPTS, both, left_padded, make_model

LETTERS = "abcdefghij"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 3 to 12 are the letters a to j."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def with_stops(model: PreTrainedModel, strings: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `generate` with these stop strings, without emssd and with it."""
    options = {"max_new_tokens": 20, "do_sample": False, "stop_strings": strings, **options}
    tokenizer, ours = make_tokenizer(), {"custom_generate": emssd.custom_generate, "drafter": LLMA}
    theirs = model.generate(**left_padded(), **options, tokenizer=tokenizer)
    return theirs, model.generate(**left_padded(), **options, **ours, tokenizer=tokenizer, draft_tokenizer=tokenizer)


class TestStopStrings:
    @pytest.mark.parametrize("eos", [[5, 7], [12], None], ids=str)
    @pytest.mark.parametrize("seed", range(3))
    def test_end_rows_where_those_of_transformers_end_beside_rows_that_eos_ends(self, seed: int, eos: Any) -> None:
        """Without EOS nothing is padded there: a row that has ended goes on until all have."""
        model, num_inputs = make_model(seed=seed), max(map(len, PROMPTS))
        free = model.generate(**left_padded(), max_new_tokens=20, do_sample=False, eos_token_id=None)[:, num_inputs:]
        text = ["".join(LETTERS[token - 3] if token >= 3 else "-" for token in row) for row in free.tolist()]
        strings = [row[place : place + 2] for row, place in zip(text[:3], (2, 5, 9), strict=True)]
        expected, got = with_stops(model, strings, eos_token_id=eos, pad_token_id=PAD)
        assert expected.shape[1] - num_inputs > 1
        assert torch.equal(expected, got)

    def test_may_begin_in_the_prompt_and_be_a_single_text(self) -> None:
        model = make_model(seed=1)
        first = int(model.generate(**left_padded(), max_new_tokens=1, do_sample=False)[0, -1])
        assert first >= 3
        expected, got = with_stops(model, "ea" + LETTERS[first - 3], eos_token_id=None, pad_token_id=PAD)
        assert torch.equal(expected, got)
        with_eos, ours = with_stops(model, "ea" + LETTERS[first - 3], eos_token_id=12, pad_token_id=PAD)
        assert (with_eos[0, max(map(len, PROMPTS)) + 1 :] == PAD).all()  # the first row ends with its first token
        assert torch.equal(with_eos, ours)

    def test_of_a_criterion_of_the_callers_own_are_followed(self) -> None:
        criterion = StopStringCriteria(tokenizer=make_tokenizer(), stop_strings=["c", "dd"])
        options = {"stopping_criteria": StoppingCriteriaList([criterion]), "pad_token_id": PAD}
        expected, got = both(make_model(seed=2), left_padded(), **options)
        assert torch.equal(expected, got)


def test_rows_whose_time_is_over_have_the_tokens_of_the_unlimited_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until it has been looked at a dozen times, which is after the first step."""
    model, num_inputs = make_model(), max(map(len, PROMPTS))
    full = model.generate(**left_padded(), max_new_tokens=20, do_sample=False, eos_token_id=None)
    calls = iter(range(10**6))
    monkeypatch.setattr(stopping_criteria.time, "time", lambda: float(next(calls) > 12))
    kwargs: dict[str, Any] = {"custom_generate": emssd.custom_generate, "drafter": LLMA, "max_time": 0.5}
    got = model.generate(**left_padded(), max_new_tokens=20, do_sample=False, eos_token_id=None, **kwargs)
    assert num_inputs < got.shape[1] < full.shape[1]
    assert torch.equal(got, full[:, : got.shape[1]])
