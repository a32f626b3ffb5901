"""The sweep of all models on a few of them, what it can tell, and its page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from emssd.model import probe, target


@pytest.mark.parametrize(
    ("model_type", "variant", "outcome", "reason"),
    [
        ("opt", "default", "served", ""),
        ("gemma2", "default", "served", ""),
        ("phimoe", "windows", "served", ""),
        ("qwen2_moe", "features", "served", ""),
        ("gemma4_text", "shared", "served", ""),
        ("got_ocr2", "default", "served", ""),  # hands logits_to_keep to its attention
        ("lfm2", "default", "served", ""),
        ("qwen3_5", "default", "served", ""),  # linear attention, in a model for images
        ("llama4_text", "full", "served", "counts the tokens of a call|other logits when sequences are packed"),
        ("llama4_text", "one chunk", "served", ""),
        ("bloom", "default", "served", "ALiBi"),
    ],
)
def test_a_tiny_model_is_right_or_refused(load: Any, model_type: str, variant: str, outcome: str, reason: str) -> None:
    with torch.random.fork_rng():
        result = load("model_sweep").sweep_one(model_type, variant)
    assert (result.outcome, result.num_wrong) == (outcome, 0), result
    assert re.search(reason, result.reason) if reason else not result.reason
    assert outcome != "served" or result.num_accepted > 50


def test_wrong_tokens_are_told(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "learn_windows", lambda _: {})
    monkeypatch.setattr(probe, "_compare", lambda *_: None)
    with torch.random.fork_rng():
        result = load("model_sweep").sweep_one("phimoe", "windows")
    assert result.outcome == "wrong"
    assert result.num_wrong > 2  # four rows are longer than the window


def test_every_type_has_a_tiny_config_or_says_why_not(load: Any) -> None:
    tiny = load("tiny_configs")
    config = tiny.build_config("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"]  # one of each kind
    assert (config.sliding_window, config.vocab_size, config.num_hidden_layers) == (7, tiny.VOCAB_SIZE, 2)
    assert tiny.build_config("gpt2", "windows") is None
    assert tiny.build_config("mistral", "windows").sliding_window == 6
    assert len(tiny.causal_lm_types()) > 150


def test_the_page_is_that_of_the_results_and_nothing_is_wrong(load: Any) -> None:
    module = load("model_page")
    results = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    assert module.PAGE.read_text(encoding="utf-8") == module.page(results)
    assert not [case for case in results["cases"] if case["outcome"] in ("wrong", "failed")]
    assert {case["model_type"] for case in results["cases"]} >= {"llama", "phimoe", "gpt_oss", "whisper"}
