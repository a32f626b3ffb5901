"""Rules in a model's masks alone, and attention sinks, are honoured, or refused with the reason.

Oracle: the model's own eager forward pass over each row alone, anew for every token, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference
from transformers import PreTrainedModel, masking_utils
from transformers.models.llama import modeling_llama

from emssd import Engine
from emssd.attention import AttentionBackend
from emssd.errors import CompileError, UnsupportedModelError
from emssd.model import ModelOptions, TargetModel
from emssd.model.compile.compiled import CompiledForward
from emssd.model.hf.masks import window_of
from tests.support.backends import CONFIGS
from tests.support.tiers import looped

from .conftest import LLMA, PROMPTS

LLAMA4: dict[str, Any] = {
    "intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 2, "moe_layers": [1], "no_rope_layers": [1, 0],
    "attn_temperature_tuning": True, "attn_scale": 1.0,
}  # fmt: skip
FULL = ["full_attention", "full_attention"]


random_model = partial(tiny_model, max_model_len=64)


def alone(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """`greedy_reference` with experts that compute in float64."""
    before, model.config._experts_implementation = model.config._experts_implementation, "eager"
    row = greedy_reference(model, prompt, count)
    model.config._experts_implementation = before
    return row


def assert_exact(model: PreTrainedModel, **options: Any) -> Engine:
    engine = Engine.from_model(model, batch_size=2, **options)
    done = engine.generate(PROMPTS, 12, ignore_eos=True)
    for prompt, generation in zip(PROMPTS, done, strict=True):
        assert list(generation.token_ids) == alone(model, prompt, len(generation.token_ids))
    return engine


class TestWindows:
    @pytest.mark.parametrize("architecture", ["phimoe", "qwen2_moe"])
    def test_a_window_that_only_the_mask_knows_is_honoured(self, architecture: str) -> None:
        more = {"num_local_experts": 4} if architecture == "phimoe" else {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "use_sliding_window": True,
            "shared_expert_intermediate_size": 24, "max_window_layers": 1,
        }  # fmt: skip
        model = random_model(architecture, sliding_window=7, **more)
        engine = assert_exact(model)
        windows = [layer.sliding_window for layer in engine.target.layers]
        assert windows == ([7, 7] if architecture == "phimoe" else [7, None])
        done = engine.generate(PROMPTS, 12, ignore_eos=True)
        model.config.sliding_window = 100  # proves that these rows are long enough to tell
        assert any(list(ours.token_ids) != alone(model, prompt, 12) for prompt, ours in zip(PROMPTS, done, strict=True))

    @pytest.mark.costly("compiles a model")
    def test_a_window_that_only_the_mask_knows_is_honoured_by_the_compiled_model(self) -> None:
        model = random_model("phimoe", sliding_window=7, num_local_experts=2, num_hidden_layers=1).float()
        plain, compiled = (Engine.from_model(model, compile=compiled) for compiled in (False, True))
        assert compiled.target.compiled is not None
        assert [layer.sliding_window for layer in compiled.target.layers] == [7]
        ours, theirs = (engine.generate(PROMPTS, 12, ignore_eos=True) for engine in (compiled, plain))
        assert [row.token_ids for row in ours] == [row.token_ids for row in theirs]

    def test_a_window_longer_than_any_row_of_the_probe_is_learnt_from_the_mask(self) -> None:
        model = random_model("phimoe", sliding_window=33, num_local_experts=2)
        for longest, windows in ((None, [33, 33]), (33, [None, None])):
            target = TargetModel(model, ModelOptions(max_model_len=longest))
            assert [layer.sliding_window for layer in target.layers] == windows

    def test_a_window_that_the_mask_does_not_have_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = modeling_llama.LlamaAttention.forward

        def with_window(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs, sliding_window=30)

        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", with_window)
        with pytest.raises(UnsupportedModelError, match="gives layer 0 a sliding window of 30, and a mask without one"):
            TargetModel(tiny_model("llama"))
        assert TargetModel(tiny_model("llama"), ModelOptions(max_model_len=30)).max_model_len == 30

    def test_a_mask_that_the_model_changes_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = modeling_llama.create_causal_mask

        def later(*args: Any, **kwargs: Any) -> Any:
            mask = made(*args, **kwargs)
            return mask if mask is None else mask.clone()

        monkeypatch.setattr(modeling_llama, "create_causal_mask", later)
        with pytest.raises(UnsupportedModelError, match="an attention mask of its own"):
            TargetModel(tiny_model("llama"))


class TestTheRuleOfAMask:
    @looped("length", [2, 7, 64, 5000, 1_000_000])
    @looped("window", [1, 5, 63, 4999])
    def test_windows_and_causal_masks_are_known(self, window: int, length: int) -> None:
        visible = masking_utils.sliding_window_causal_mask_function(window)
        assert window_of(visible, length, "It") == (window if window < length else None)
        assert window_of(masking_utils.causal_mask_function, length, "It") is None

    @looped("chunk", [1, 8, 32, 40, 63, 4096, 8192, 250_000, 999_999])  # 8 and 32 end with the shorter length
    def test_chunks_are_told_from_windows_and_are_no_rule_within_one(self, chunk: int) -> None:
        visible = masking_utils.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
        if chunk > 1:  # of one, each token sees itself: that is a window
            with pytest.raises(UnsupportedModelError, match="It has an attention mask that is neither"):
                window_of(visible, 64 if chunk < 64 else 1_000_000, "It")
        assert window_of(visible, chunk, "It") is None

    def test_masks_about_more_than_positions_are_refused(self) -> None:
        causal, image = masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.tensor([[-1, 0]]))
        padding = masking_utils.and_masks(causal, masking_utils.padding_mask_function(torch.ones(1, 2)))
        other = functools.partial(causal)  # whatever it holds
        both_ways = masking_utils.bidirectional_mask_function
        for visible in (masking_utils.or_masks(causal, image), padding, other, both_ways):
            with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
                window_of(visible, 64, "It")

    def test_blocks_of_images_that_are_not_there_are_no_rule(self) -> None:
        none = masking_utils.blockwise_overlay(torch.tensor([[-1, -1]]))
        sliding = masking_utils.sliding_window_causal_mask_function(5)
        both = masking_utils.or_masks(masking_utils.causal_mask_function, none)
        assert window_of(both, 64, "It") is None
        assert window_of(masking_utils.and_masks(both, masking_utils.sliding_window_overlay(5)), 64, "It") == 5
        assert window_of(masking_utils.or_masks(sliding, none), 64, "It") == 5


class TestPositionsBeyondTheProbe:
    def test_a_temperature_by_counted_tokens_is_refused_where_a_sequence_can_reach_it(self) -> None:
        model = random_model("llama4_text", layer_types=FULL, floor_scale=32, **LLAMA4)
        with pytest.raises(UnsupportedModelError, match=r"counts the tokens of a call .* in sequences of 64 tokens"):
            TargetModel(model)
        with pytest.raises(UnsupportedModelError, match="in sequences of 32 tokens"):
            TargetModel(model, ModelOptions(max_model_len=32))
        assert_exact(model, max_model_len=31)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_a_small_change_far_away_is_found_in_any_precision(self, dtype: torch.dtype) -> None:
        more = LLAMA4 | {"attn_scale": 0.02}
        with pytest.raises(UnsupportedModelError, match="counts the tokens of a call"):
            TargetModel(random_model("llama4_text", layer_types=FULL, floor_scale=40, **more).to(dtype))

    def test_chunks_are_served_in_sequences_of_one(self) -> None:
        model = random_model("llama4_text", attention_chunk_size=32, floor_scale=100, **LLAMA4)
        with pytest.raises(UnsupportedModelError, match=r"layers of type chunked_attention; model\.max_model_len=32"):
            TargetModel(model)
        assert_exact(model, max_model_len=32)

    def test_rotary_positions_counted_along_the_pack_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = modeling_llama.LlamaRotaryEmbedding.forward

        def counted(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            places = torch.ones(1, x.shape[1]).cumsum(1) - 1  # rotary embeddings do not see a shift of a whole row
            return original(self, x, places)

        monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", counted)
        with pytest.raises(UnsupportedModelError, match="other logits when sequences are packed into one row"):
            TargetModel(tiny_model("llama"))


class TestExperts:
    def test_a_mixture_of_experts_runs_in_float64_and_is_left_as_it_was(self) -> None:
        model = random_model("mixtral", num_local_experts=4)
        assert model.config._experts_implementation == "grouped_mm"  # which PyTorch does not have in float64
        assert_exact(model)
        assert model.config._experts_implementation == "grouped_mm"

    def test_other_precisions_keep_their_experts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.mixtral import modeling_mixtral

        model, seen = random_model("mixtral", num_local_experts=4).float(), set()
        original = modeling_mixtral.MixtralSparseMoeBlock.forward

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.add(self.experts.config._experts_implementation)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(modeling_mixtral.MixtralSparseMoeBlock, "forward", noted)
        TargetModel(model)
        assert seen == {"grouped_mm"}


def gpt_oss() -> Any:
    """A tiny one whose sinks take much of the attention, with windows of 6 in every other layer."""
    more: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}
    model: Any = random_model("gpt_oss", vocab_size=13, std=0.5, **more)
    model.set_experts_implementation("eager")  # the default has no float64
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.tensor([-2.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    return model


@pytest.mark.parametrize("backend", [CONFIGS[name] for name in ("fused", "torch", "padded")], ids=str)
def test_sinks_that_change_between_two_runs_are_read_again(kernels: None, backend: Any) -> None:
    model, runs = gpt_oss(), list[list[list[int]]]()
    engine = Engine.from_model(model, drafter=LLMA, backend=backend, batch_size=3, budget="fixed")
    for change in (0.0, 3.0):
        for layer in model.model.layers:
            layer.self_attn.sinks.data.add_(change)
        runs.append([[*row.token_ids] for row in engine.generate(PROMPTS, 16, ignore_eos=True)])
        assert runs[-1] == [greedy_reference(model, prompt, 16) for prompt in PROMPTS]
        assert engine.report.num_accepted > 0
    assert runs[0] != runs[1]


def test_a_token_that_becomes_nan_matters_to_its_readers_alone() -> None:
    model, prompts = gpt_oss(), [[1, 2], [4]]
    engine = Engine.from_model(model, backend="ragged")
    model.get_input_embeddings().weight.data[3] = torch.nan  # one that the probe reads
    reference = [greedy_reference(model, prompt, 6) for prompt in prompts]
    assert [[*row.token_ids] for row in engine.generate(prompts, 6, ignore_eos=True)] == reference


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
