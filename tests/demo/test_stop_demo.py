"""Stop strings on the embedded model end rows where ``generate(stop_strings=…)`` ends them, row by row, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from emssd import Engine, demo
from emssd.sequences import FinishReason

LIMIT = 32
STOPS = (["he s"], ["ng", "e.\n"], [" o", "()"], ["no such text"])


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    path = demo.model_path("target")
    return AutoModelForCausalLM.from_pretrained(path, dtype="float64").eval(), AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [prompt.text for prompt in demo.prompts(8)]


@pytest.fixture(scope="module")
def expected(target: tuple[Any, Any], prompts: list[str]) -> list[list[list[int]]]:
    """New tokens of each prompt for each of `STOPS`, one prompt at a time."""
    model, tokenizer = target

    def decode(prompt: str, stop: list[str]) -> list[int]:
        inputs = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": LIMIT, "do_sample": False, "stop_strings": stop, "tokenizer": tokenizer}
        tokens: list[int] = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    return [[decode(prompt, stop) for prompt in prompts] for stop in STOPS]


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", ["none", "llma", "draft_model"])
def test_rows_end_where_transformers_ends_them(
    target: tuple[Any, Any], prompts: list[str], expected: list[list[list[int]]], drafter: str
) -> None:
    tokenizer = target[1]
    engine = Engine.from_model(*target, drafter=drafter, batch_size=5)
    reasons = []
    for stop, tokens in zip(STOPS, expected, strict=True):
        generations = engine.generate(prompts, LIMIT, stop=stop)
        assert [list(generation.token_ids) for generation in generations] == tokens
        for generation in generations:
            whole = tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            places = [whole.find(string) for string in stop if string in whole]
            assert generation.text == (whole[: min(places)] if places else whole)
            assert (generation.finish_reason is FinishReason.STOP) == bool(places)
            reasons.append(generation.finish_reason)
    assert reasons.count(FinishReason.STOP) >= 10  # else the comparison would say little
    assert reasons.count(FinishReason.LENGTH) >= 4
