"""Models that cannot be served are refused before any work, with the reason; nothing that changes tokens gets by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_ragged.fused import FusedKernels
from emssd_ragged.grouped import GroupedKernels
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from emssd import Engine
from emssd.errors import ConfigError, PluginError, UnsupportedModelError
from emssd.model import ModelOptions, TargetModel, load_model
from emssd.model.compile.packed import round_weights
from emssd.model.hf.refusals import check_config
from emssd.model.load.loading import counting_model
from tests.support.tiers import looped

SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 61,
}  # fmt: skip


@looped(
    ("values", "message"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"vocab_size": 0}, "vocab_size is 0 or less"),
        ({"vocab_size": -1}, "vocab_size is 0 or less"),
        ({"intermediate_size": -1}, "RuntimeError: .*negative dimension"),
        ({"pad_token_id": 99}, "AssertionError: Padding_idx"),
        ({"dtype": "float3"}, "AttributeError: .*float3"),
        ({"hidden_act": "swish9"}, "KeyError: 'swish9'"),
        ({"eos_token_id": [[1]]}, "'eos_token_id' with value"),
        ({"model_type": 3}, "Unrecognized model identifier: 3"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "vit"}, "Unrecognized configuration class|has no value"),
    ],
)
def test_a_shape_that_makes_no_model(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        counting_model(SHAPE | values, torch.float32, torch.device("cpu"))
    assert len(str(refusal.value)) < 500


ENCODER_DECODER = "encoder-decoder model, and emssd decodes decoder-only"
ALIBI = "ALiBi biases"
NO_INTERFACE = "does not use Transformers' attention interface"
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ONE_LONGROPE = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def folder_with_config_only(path: Path, architecture: str, **values: Any) -> str:
    AutoConfig.for_model(architecture, **values).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("t5", {}, ENCODER_DECODER),
        ("bart", {}, ENCODER_DECODER),
        ("bloom", {}, ALIBI),
        ("mpt", {}, ALIBI),
        ("falcon", {"alibi": True}, ALIBI),
        ("rwkv", {}, NO_INTERFACE),
        ("recurrent_gemma", {}, "layers of type (linear_attention|recurrent)"),
        ("gpt_neo", {}, NO_INTERFACE),
        ("llama4_text", {}, "layers of type chunked_attention"),
        ("vit", {}, "no causal language model for it"),
        ("gemma3_text", SMALL | {"head_dim": 8, "rope_parameters": ONE_LONGROPE}, "longrope"),
    ],
)
def test_a_config_that_shows_it_cannot_be_served_is_refused_without_looking_for_weights(
    architecture: str, values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        load_model(ModelOptions(folder_with_config_only(tmp_path, architecture, **values)))
    assert str(refusal.value).startswith(f"{architecture} cannot be served")


def test_a_loaded_model_is_refused_for_the_same_reasons() -> None:
    with pytest.raises(UnsupportedModelError, match=ALIBI):
        Engine.from_model(AutoModelForCausalLM.from_config(
            AutoConfig.for_model("bloom", vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
        ))  # fmt: skip


def test_a_wrapper_of_peft_is_refused_with_what_to_give() -> None:
    wrapper = type("PeftModelForCausalLM", (torch.nn.Module,), {"get_base_model": None})
    with pytest.raises(UnsupportedModelError, match=r"wrapped by PEFT; give its get_base_model\(\)"):
        check_config(tiny_model("llama").config, wrapper)


def test_rotary_frequencies_that_depend_on_the_batch_are_refused_and_served_where_they_do_not(tmp_path: Path) -> None:
    path = folder_with_config_only(tmp_path, "llama", **SMALL, rope_parameters=dict(LONGROPE))
    with pytest.raises(UnsupportedModelError, match=r"longrope .*model\.max_model_len=32 or less works"):
        load_model(ModelOptions(path))
    with pytest.raises(ConfigError, match="tokenizer is missing"):  # that length is fine
        load_model(ModelOptions(path, max_model_len=32))
    model = tiny_model("llama", max_model_len=64, dtype=torch.float32, rope_parameters=dict(LONGROPE))
    with pytest.raises(UnsupportedModelError, match="longrope"):
        Engine.from_model(model, max_model_len=33)
    engine = Engine.from_model(model.double(), max_model_len=32)
    prompts = [[3, 4, 5, 6, 3, 4], [7] * 20]
    for prompt, ours in zip(prompts, engine.generate(prompts, 12, ignore_eos=True), strict=True):
        assert list(ours.token_ids) == greedy_reference(model, prompt, 12)


def test_dynamic_rotary_frequencies_are_served_up_to_the_models_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", dtype=torch.float32, max_model_len=32, rope_parameters=rope).double()
    prompts = [[3, 4, 5, 6, 3, 4, 5, 6, 3, 4], [7, 8]]
    done = Engine.from_model(model).generate(prompts, 22, ignore_eos=True)
    assert len(prompts[0]) + len(done[0].token_ids) == 32
    for prompt, ours in zip(prompts, done, strict=True):
        assert list(ours.token_ids) == greedy_reference(model, prompt, 22)


def test_attention_sinks_are_refused_by_backends_that_do_not_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_oss", dtype=torch.float32, num_local_experts=2, num_experts_per_tok=1)
    for kernels in (FusedKernels, GroupedKernels):
        monkeypatch.setattr(kernels, "takes_sinks", False)
    with pytest.raises(PluginError, match=r"'ragged' cannot serve this model: it computes no attention sinks, and the"):
        Engine.from_model(model)


@pytest.mark.parametrize("keyword", ["alibi_slopes", "some_new_feature", "dropout"])
def test_a_keyword_that_emssd_does_not_know_and_dropout_are_refused(
    keyword: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if keyword != "dropout":
            return original(self, *args, **kwargs, **{keyword: torch.ones(4)})
        self.training, self.attention_dropout = True, 0.1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=f"LlamaAttention asks its attention for {keyword}"):
        Engine.from_model(tiny_model("llama"))


class TestTheProbe:
    """No config tells these; only running the model does."""

    def test_refuses_tokens_that_are_mixed_outside_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = modeling_llama.LlamaMLP.forward

        def cumulative_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
            count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)
            return original(self, x.cumsum(dim=1) / count)

        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", cumulative_mean)
        module = r"packed into one row.*: model\.layers\.0\.mlp mixes tokens, or counts them; decode it with its own"
        with pytest.raises(UnsupportedModelError, match=module):
            TargetModel(tiny_model("llama"))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_refuses_learned_positions_counted_along_the_packed_row_in_any_precision(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers.models.gpt2.modeling_gpt2 import GPT2Model

        original = GPT2Model.forward

        def counted(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        monkeypatch.setattr(GPT2Model, "forward", counted)
        with pytest.raises(UnsupportedModelError, match="other logits when sequences are packed into one row"):
            TargetModel(tiny_model("gpt2", dtype=dtype))

    def test_refuses_a_layer_that_goes_round_the_attention_interface(self) -> None:
        model = tiny_model("llama")
        attention = model.model.layers[1].self_attn
        attention.forward = lambda hidden_states, **_: (hidden_states.cumsum(dim=1), None)
        with pytest.raises(UnsupportedModelError, match="sends 1 of its 2 layers through the attention interface"):
            TargetModel(model)

    def test_refuses_a_scale_that_never_reaches_the_attention_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = modeling_llama.eager_attention_forward

        def sharper(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(module, 2 * query, *args, **kwargs)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", sharper)
        with pytest.raises(UnsupportedModelError, match="a feature that does not go through its attention function"):
            TargetModel(tiny_model("llama"))


def test_a_layer_that_changes_its_rules_while_running_is_refused() -> None:
    model = tiny_model("mistral", max_model_len=64)
    engine = Engine.from_model(model, frozen=True)  # or the run would look before it begins
    model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(UnsupportedModelError, match="layer 1 changed its attention from"):
        engine.generate([[3, 4, 5]], 4)


def test_unknown_paths_dtypes_and_devices_are_told_with_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load the model '.*nowhere': there is no such folder.*or 'demo'"):
        load_model(ModelOptions(str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"cannot load the model 'nowhere\.gguf': there is no such file.*or 'demo'"):
        load_model(ModelOptions("nowhere.gguf"))
    path = folder_with_config_only(tmp_path, "llama", **SMALL)
    assert load_model(ModelOptions("demo", dtype=torch.float64))[0].dtype is torch.float64
    with pytest.raises(ConfigError, match="unknown dtype 'float8'; choose auto, float64, float32, bfloat16, float16"):
        load_model(ModelOptions(path, dtype="float8"))
    with pytest.raises(ConfigError, match=r"device 'nowhere' cannot be used here .*; try device=cpu"):
        load_model(ModelOptions(path, device="nowhere"))


def test_unknown_drafters_and_backends_are_told_before_a_model_is_looked_for() -> None:
    with pytest.raises(PluginError, match=r"unknown drafter 'telepathy'; choose one of .*llma"):
        Engine.from_pretrained("/nowhere", drafter="telepathy")
    with pytest.raises(PluginError, match=r"unknown backend 'abacus'; choose one of .*ragged"):
        Engine.from_pretrained("/nowhere", backend="abacus")


@pytest.mark.parametrize("max_model_len", [-1, 0, 1, 129])
def test_a_max_model_len_outside_the_models_range_is_refused(max_model_len: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len is {max_model_len}; this model takes 2 to 128 tokens"):
        Engine.from_model(tiny_model("opt"), max_model_len=max_model_len)
    path = folder_with_config_only(tmp_path, "opt", max_position_embeddings=128)
    with pytest.raises(ConfigError, match=f"max_model_len is {max_model_len}"):
        load_model(ModelOptions(path, max_model_len=max_model_len))


@looped("max_model_len", [2, 3, 5, 128])
def test_every_max_model_len_in_the_models_range_is_served(max_model_len: int) -> None:
    engine = Engine.from_model(tiny_model("opt"), max_model_len=max_model_len)
    (generation,) = engine.generate([[3]], 200, ignore_eos=True)
    assert len(generation.token_ids) == max_model_len - 1


def test_a_model_without_a_length_limit_asks_for_one() -> None:
    model = tiny_model("llama")
    object.__setattr__(model.config, "max_position_embeddings", None)  # as configs without such an entry have it
    with pytest.raises(ConfigError, match=r"llama has no length limit in its config; set model\.max_model_len"):
        Engine.from_model(model)
    assert Engine.from_model(model, max_model_len=50).target.max_model_len == 50


def test_weights_that_are_not_finite_and_autocast_are_named() -> None:
    model: Any = tiny_model("llama", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError, match=r"leave its block"):
        Engine.from_model(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModelError, match=r"not finite: model\.layers\.1\.mlp\.up_proj\.weight has NaN"):
        Engine.from_model(model)
    packed: Any = tiny_model("llama", dtype=torch.float32)
    round_weights(packed)  # its stand-ins are NaN
    with torch.no_grad():
        packed.model.norm.weight[0] = torch.inf
    with pytest.raises(UnsupportedModelError, match=r"not finite: model\.norm\.weight has NaN"):
        Engine.from_model(packed)


@looped("base", [False, True])
def test_a_compiled_model_is_refused_before_it_runs(base: bool) -> None:
    for compile_ in (lambda part: part.compile(), lambda part: setattr(part, "forward", torch.compile(part.forward))):
        model = tiny_model("llama", vocab_size=13)
        compile_(model.model if base else model)
        with pytest.raises(
            UnsupportedModelError, match=r"Llama\w+ is compiled by torch.compile, which hides its attent"
        ):
            Engine.from_model(model)
