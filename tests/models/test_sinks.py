"""Attention sinks, as gpt-oss has them: tokens are those of the model's own eager attention, on every CPU backend."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from emssd_llma import LLMAConfig, Search
from emssd_padded import PaddedConfig
from emssd_ragged import Kernels, RaggedConfig
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from emssd import Engine
from emssd.attention import AttentionBackend
from emssd.errors import CompileError, UnsupportedModelError
from emssd.model import TargetModel
from emssd.model.compiled import CompiledForward
from emssd.testing.oracle import greedy_reference

PROMPTS = ((3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4), (8,), (9, 3, 11, 4, 9, 3, 12, 5, 9, 3))
LLMA = LLMAConfig(match_length=1, copy_length=4, search=Search.prompt_and_output, require_full_copy=False)
NEW_TOKENS = 16


def gpt_oss(vocab_size: int = 13) -> PreTrainedModel:
    """A tiny one whose sinks take much of the attention, with windows of 6 in every other layer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=vocab_size, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        sliding_window=6, max_position_embeddings=64, initializer_range=0.5, eos_token_id=None, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    config._experts_implementation = "eager"  # the default has no float64
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(1.0, 2.0)
    model.eval()
    return cast("PreTrainedModel", model)


BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(RaggedConfig(kernels=Kernels.fused), id="fused"),
        pytest.param(RaggedConfig(kernels=Kernels.torch), id="torch"),
        pytest.param(PaddedConfig(), id="padded"),
    ],
)


@BACKENDS
def test_tokens_are_those_of_the_models_own_attention(kernels: None, backend: Any) -> None:
    model = gpt_oss()
    engine = Engine.from_model(model, drafter=LLMA, backend=backend, batch_size=3, budget="fixed")
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, NEW_TOKENS), strict=True):
        assert list(done.token_ids) == list(greedy_reference(model, prompt, NEW_TOKENS))
    assert engine.report.num_accepted > 0


@BACKENDS
def test_sinks_that_change_between_two_runs_are_read_again(kernels: None, backend: Any) -> None:
    model = gpt_oss()
    engine = Engine.from_model(model, drafter=LLMA, backend=backend)
    before = engine.generate(PROMPTS, NEW_TOKENS)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.add_(3.0)
    after = engine.generate(PROMPTS, NEW_TOKENS)
    assert [list(each.token_ids) for each in after] == [greedy_reference(model, each, NEW_TOKENS) for each in PROMPTS]
    assert [each.token_ids for each in after] != [each.token_ids for each in before]


def test_a_backend_that_takes_no_other_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt_oss()
    engine = Engine.from_model(model, backend="padded")
    monkeypatch.setattr(type(engine.runner.backend), "take_sinks", AttentionBackend.take_sinks)  # type: ignore[attr-defined]
    sinks = model.model.layers[1].self_attn.sinks.data
    before = sinks.clone()
    sinks.add_(1.0)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"sinks have changed, .* a PaddedBackend, takes no others"):
            engine.generate(PROMPTS, 2)
    sinks.copy_(before)
    assert engine.generate(PROMPTS, 2)


def test_no_program_is_made_of_a_model_with_sinks() -> None:
    with pytest.raises(CompileError, match="GptOssForCausalLM has attention sinks, which no program is made with"):
        CompiledForward(TargetModel(gpt_oss()))
