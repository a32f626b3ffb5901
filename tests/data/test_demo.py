"""The embedded pair: what ships is small, loads, is really accelerated, and can be trained anew."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emssd_testing.models import tiny_model

from emssd import Engine, demo
from emssd.data.demo.corpus import Document, documents, make_prompts
from emssd.errors import ConfigError, PromptError
from tests.support.tiers import looped

MEGABYTE = 10**6


def test_all_of_it_takes_at_most_ten_megabytes() -> None:
    weights = demo.model_path("target").parent
    assert sum(file.stat().st_size for file in weights.rglob("*") if file.is_file()) <= 10 * MEGABYTE


@looped("name", ["target", "draft"])
def test_the_models_load_without_a_warning_in_float32(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(demo.model_path(name), dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(demo.model_path(name))
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    text = "   >>> x = [1, 2]  # “quoted” — and\n\ttabbed"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no embedded model 'oracle'; choose one of target, draft, eagle3"):
        demo.model_path("oracle")


def test_prompts_are_the_same_every_time_and_named_apart() -> None:
    prompts = demo.prompts()
    assert prompts == demo.prompts()
    assert len(prompts) >= 32
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert demo.prompts(5) == prompts[:5]


def test_a_document_more_or_less_leaves_the_other_prompts_alone() -> None:
    docs = documents()
    fewer = make_prompts(docs[:5] + docs[6:])
    assert {prompt for prompt in make_prompts(docs) if not prompt.prompt_id.startswith(docs[5].name)} == set(fewer)


def test_a_python_without_its_documentation_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(PromptError, match="without its documentation"):
        documents()


def test_a_document_too_short_gives_no_prompt() -> None:
    assert make_prompts([Document("short", ("One line.",))]) == []


def test_the_head_is_small_and_goes_with_the_demo_only() -> None:
    size = sum(file.stat().st_size for file in demo.model_path("eagle3").iterdir())
    assert size <= 1.5 * MEGABYTE
    with pytest.raises(ConfigError, match=r"this is the demo's head, so give drafter\.path"):
        Engine.from_model(tiny_model("llama"), drafter="eagle3")


def decoded(engine: Engine) -> list[tuple[int, ...]]:
    return [row.token_ids for row in engine.generate([prompt.text for prompt in demo.prompts(12)], 48)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return decoded(Engine.from_pretrained("demo", drafter="none"))


@pytest.mark.parametrize(("drafter", "longest"), [("llma", 8), ("draft_model", 5), ("eagle3", 6)])
def test_drafters_are_accepted_and_change_nothing(drafter: str, longest: int, plain: list[tuple[int, ...]]) -> None:
    engine = Engine.from_pretrained("demo", drafter=drafter, budget="fixed")
    assert decoded(engine) == plain
    assert 1.5 < engine.report.mean_acceptance_length < longest
    assert engine.report.num_accepted < engine.report.num_drafted


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], bytes]:
    """``trained(folder, seed)`` gives the weights of a target that was trained for two steps, with a draft model."""
    train = importlib.import_module("benchmarks.demo.__main__").main

    def weights(folder: str, seed: int) -> bytes:
        out = tmp_path / folder
        steps = ["--steps", "2", "--draft-steps", "1", "--rows", "1", "--threads", "1"]
        train(["--out", str(out), *steps, "--seed", str(seed)])
        record = json.loads((out / "TRAINING.json").read_text())
        assert record["seed"] == seed
        assert record["steps"] == {"target": 2, "draft": 1}
        return (out / "target" / "model.safetensors").read_bytes()

    return weights


@pytest.mark.nightly
def test_the_seed_decides_how_the_models_are_trained(trained: Callable[[str, int], bytes]) -> None:
    first = trained("a", 1)
    assert trained("b", 1) == first
    assert trained("c", 2) != first


def test_the_models_can_be_trained_anew(trained: Callable[[str, int], bytes], tmp_path: Path) -> None:
    assert trained("a", 1)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "draft", dtype="auto")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "a" / "draft"))


def test_the_head_learns_from_other_prompts_than_those_it_is_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, shipped = importlib.import_module("benchmarks.demo.head").prompts(2)
    assert shipped == [prompt.text for prompt in demo.prompts()]
    assert len(drawn) > len(shipped)
    assert not {*drawn} & {*shipped}
