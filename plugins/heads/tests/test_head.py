"""EAGLE-3 heads in each published layout give what their formulas say, dense and in batches with trees."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads.config import LAST_NORMED, TargetSizes
from emssd_heads.eagle3.drafter import load_eagle3

from emssd.errors import ConfigError
from tests.support.heads import (
    SMALL,
    Weights,
    assert_ragged,
    assert_same,
    changed,
    dense_layer,
    dense_rms,
    drawn_rows,
    eagle3_shapes,
    layer_weights,
    numbers,
    random_weights,
    refusal,
    write_head,
)
from tests.support.tiers import looped

H, V, VD, L = 16, 40, 12, 9
load = partial(load_eagle3, target=TargetSizes(V, H, L, torch.float64))
CONFIG: dict[str, Any] = SMALL | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": V,
    "draft_vocab_size": VD,
    "max_position_embeddings": 8,  # shorter than the sequences, as in published heads
}
DRAFTED = sorted(torch.randperm(V, generator=torch.Generator().manual_seed(5))[:VD].tolist())


def head_weights(config: dict[str, Any] = CONFIG) -> Weights:
    shapes = eagle3_shapes(config, 3)
    for layer in range(1, config.get("num_hidden_layers", 1)):
        shapes |= {f"layers.{layer}.input_layernorm.weight": (H,), **layer_weights(f"layers.{layer}.", config, H)}
    vocabulary = {
        "d2t": torch.tensor(DRAFTED) - torch.arange(VD),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, torch.tensor(DRAFTED), True),
    }
    return random_weights(shapes) | vocabulary


def dense_outputs(w: Weights, pairs: torch.Tensor, first: str = "midlayer.", **flags: Any) -> torch.Tensor:
    """Outputs ``[n, H]`` of one sequence of ``pairs [n, 2 * H]``, as the format's description says it."""
    config, (embeds, features) = CONFIG | flags, pairs.chunk(2, -1)
    eps, positions = config["rms_norm_eps"], range(len(pairs))
    normed = dense_rms(features, w[f"{first}hidden_norm.weight"].double(), eps)
    attended = torch.cat([dense_rms(embeds, w[f"{first}input_layernorm.weight"].double(), eps), normed], -1)
    residual = normed if flags.get("norm_before_residual") else features
    h = dense_layer(w, first, config, residual, attended, positions)
    for layer in range(1, config["num_hidden_layers"]):
        normed = dense_rms(h, w[f"layers.{layer}.input_layernorm.weight"].double(), eps)
        h = dense_layer(w, f"layers.{layer}.", config, h, normed, positions)
    return dense_rms(h, w["norm.weight"].double(), eps) if flags.get("norm_output") else h


def dense_logits(w: Weights, out: torch.Tensor, **flags: Any) -> torch.Tensor:
    normed = out if flags.get("norm_output") else dense_rms(out, w["norm.weight"].double(), CONFIG["rms_norm_eps"])
    return normed @ w["lm_head.weight"].double().T


def renamed(weights: Weights, *pairs: tuple[str, str]) -> Weights:
    for old, new in pairs:
        weights = {re.sub(f"^{re.escape(old)}", new, name): weight for name, weight in weights.items()}
    return weights


def speculators_config(**more: Any) -> dict[str, Any]:
    layers = {name: value for name, value in CONFIG.items() if name not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": ["y"]}},
        "transformer_layer_config": layers,
        "draft_vocab_size": VD,
        "norm_before_residual": False,
    } | more


def test_a_parallel_head_is_read_of_a_container(tmp_path: Path) -> None:
    """Without `norm_before_residual` in its config, that is false, other than in containers of EAGLE-3."""
    config = speculators_config(speculators_model_type="peagle", mask_token_id=3)
    del config["norm_before_residual"]
    weights = renamed(head_weights(), ("midlayer.", "layers.0.")) | {"mask_hidden": numbers(1, 1, 3 * H).float()}
    path = write_head(tmp_path, config, weights)
    head = load(path).head
    assert head.mask_token_id == 3
    assert_same(head.mask_feature(), weights["mask_hidden"][0].double() @ weights["fc.weight"].double().T)
    pairs = numbers(5, 2 * H)
    assert_ragged(head, [(pairs, 2, pairs[:1], (-1,))], partial(dense_outputs, weights, first="layers.0."))


LAYOUTS = {
    "original": (CONFIG | {"architectures": ["LlamaForCausalLM"]}, (), "pytorch_model.bin"),
    "SpecForge": (CONFIG, (), "model.safetensors"),
    "with prefix": (
        CONFIG,
        (("midlayer.", "model.layers.0."), ("fc.", "model.fc."), ("norm.", "model.norm.")),
        "model.safetensors",
    ),
    "speculators": (speculators_config(), (("midlayer.", "layers.0."),), "model.safetensors"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_each_layout_gives_what_the_formulas_say(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, names, file = LAYOUTS[layout]
    weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in head_weights().items()}
    loaded = load(write_head(tmp_path, config, renamed(weights, *names), file))
    states, embeds = numbers(11, 3 * H), numbers(11, H, seed=2)
    features = states @ weights["fc.weight"].double().T
    assert_same(loaded.head.features(states), features)
    pairs = torch.cat([embeds, features], -1)
    assert_ragged(loaded.head, [(pairs, 4, pairs[:1], (-1,))], partial(dense_outputs, weights))
    assert_same(loaded.head.logits(features, pytest.fail), dense_logits(weights, features))
    assert loaded.head.to_target(torch.arange(VD)).tolist() == DRAFTED
    assert loaded.layers == (2, L // 2, L - 3)
    assert not any(parameter.requires_grad for parameter in loaded.head.parameters())


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True},
        {"norm_output": True},
        {"num_hidden_layers": 3},
        {"rope_theta": 500000.0},
        {"head_dim": 10},
        {"num_key_value_heads": 4},
    ],
)
@pytest.mark.parametrize("backend", ["ragged", "padded"])
def test_rows_with_trees_run_together_as_each_way_alone(flags: dict[str, Any], backend: str, tmp_path: Path) -> None:
    config = CONFIG | flags
    weights = head_weights(config)
    head = load(write_head(tmp_path, config, weights)).head
    assert_ragged(head, drawn_rows(2 * H), partial(dense_outputs, weights, **flags), backend)
    assert_same(head.logits(numbers(3, H), pytest.fail), dense_logits(weights, numbers(3, H), **flags))


def test_norms_before_fc(tmp_path: Path) -> None:
    states, eps = numbers(4, 3 * H), CONFIG["rms_norm_eps"]
    weights = head_weights()
    fc = weights["fc.weight"].double()
    one = random_weights({"input_norm.weight": (3 * H,)})
    head = load(write_head(tmp_path / "one", CONFIG | {"norm_before_fc": True}, weights | one)).head
    assert_same(head.features(states), dense_rms(states, one["input_norm.weight"].double(), eps) @ fc.T)
    named = random_weights({f"fc_norm.{i}.weight": (H,) for i in range(3)})
    chunks = [
        dense_rms(chunk, norm.double(), eps) for chunk, norm in zip(states.chunk(3, -1), named.values(), strict=True)
    ]
    old = dict(zip((f"aux_norm_{name}.weight" for name in ("low", "mid", "high")), named.values(), strict=True))
    for folder, norms, flags in (("new", named, {"fc_norm": True}), ("old", old, {})):
        head = load(write_head(tmp_path / folder, CONFIG | {"eagle_config": flags}, weights | norms)).head
        assert_same(head.features(states), torch.cat(chunks, -1) @ fc.T)


def test_biases_and_norms_of_heads_as_in_qwen(tmp_path: Path) -> None:
    more = random_weights(
        {
            "midlayer.self_attn.q_norm.weight": (4,),
            "midlayer.self_attn.k_norm.weight": (4,),
            "midlayer.self_attn.q_proj.bias": (16,),
            "midlayer.self_attn.k_proj.bias": (8,),
            "midlayer.self_attn.v_proj.bias": (8,),
        },
        seed=4,
    )
    weights = head_weights() | more
    head = load(write_head(tmp_path, CONFIG | {"attention_bias": True}, weights)).head
    assert_ragged(head, drawn_rows(2 * H), partial(dense_outputs, weights))


def test_what_the_file_lacks_is_the_targets(tmp_path: Path) -> None:
    weights = head_weights()
    del weights["lm_head.weight"], weights["t2d"]
    path = write_head(tmp_path / "a", CONFIG, weights)
    head, table = load(path).head, numbers(V, H)
    normed = dense_rms(numbers(3, H), weights["norm.weight"].double(), CONFIG["rms_norm_eps"])
    assert_same(head.logits(numbers(3, H), lambda x: x @ table.T), (normed @ table.T)[:, DRAFTED])
    assert_same(head.embed(torch.tensor([7, 3]), lambda ids: table[ids]), table[[7, 3]])
    tied = weights | random_weights({"embed_tokens.weight": (V, H)})
    del tied["d2t"]
    whole = CONFIG | {"draft_vocab_size": None, "tie_word_embeddings": True}
    head = load(write_head(tmp_path / "b", whole, tied)).head
    table = tied["embed_tokens.weight"].double()
    assert_same(head.embed(torch.tensor([7, 3]), pytest.fail), table[[7, 3]])
    assert_same(head.logits(numbers(3, H), pytest.fail), normed @ table.T)
    assert head.to_target(torch.tensor([5, 6])).tolist() == [5, 6]


def test_a_head_of_the_last_hidden_state_needs_no_fc(tmp_path: Path) -> None:
    config = CONFIG | {"eagle_config": {"use_aux_hidden_state": False}}
    loaded = load(write_head(tmp_path, config, head_weights()))
    assert loaded.layers == (LAST_NORMED,)
    assert torch.equal(loaded.head.features(numbers(3, H)), numbers(3, H))


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    weights = head_weights() | random_weights({"fc.weight": (H, 3 * 20), "embed_tokens.weight": (V, H)})
    config = CONFIG | {"target_hidden_size": 20}
    head = load(write_head(tmp_path, config, weights), target=TargetSizes(V, 20, L, torch.float64)).head
    assert_same(head.features(numbers(2, 60)), numbers(2, 60) @ weights["fc.weight"].double().T)


def test_a_container_without_the_flag_norms_before_the_residual(tmp_path: Path) -> None:
    config = speculators_config()
    del config["norm_before_residual"]
    loaded = load(write_head(tmp_path, config, renamed(head_weights(), ("midlayer.", "layers.0."))))
    assert "options norm_before_residual" in loaded.described
    assert any("speculators 0.3.0" in line for line in loaded.described)


def test_later_layers_may_call_their_norm_as_the_first(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 2}
    weights = head_weights(config)
    other = renamed(weights, ("layers.1.input_layernorm", "layers.1.hidden_norm"))
    heads = [load(write_head(tmp_path / name, config, stored)).head for name, stored in (("a", weights), ("b", other))]
    for one, two in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_logits_of_the_whole_vocabulary_may_be_the_targets_and_scaled(tmp_path: Path) -> None:
    weights = head_weights()
    del weights["lm_head.weight"], weights["d2t"], weights["t2d"]
    config = CONFIG | {"draft_vocab_size": V, "logit_scale": 0.5}
    head, table = load(write_head(tmp_path, config, weights)).head, numbers(V, H)
    normed = dense_rms(numbers(3, H), weights["norm.weight"].double(), CONFIG["rms_norm_eps"])
    assert_same(head.logits(numbers(3, H), lambda x: x @ table.T), 0.5 * normed @ table.T)


@looped(
    "config, change, words",
    [
        ({}, {"norm.weight": None}, "of its weights, norm.weight is missing"),
        ({}, {"midlayer.mlp.up_proj.weight": None}, "layers.0.mlp.up_proj.weight is missing"),
        ({}, {"extra": torch.ones(2)}, "extra is without a place in such a head"),
        ({}, {"norm.weight": torch.ones(3), "fc.weight": torch.ones(5, 48)}, "(5x48 in place of 16x48), norm.weight"),
        ({}, {"layers.0.hidden_norm.weight": torch.ones(H)}, "are for the same place"),
        ({}, {"fc.weight": torch.ones(H, 50)}, "its fc reads 50 numbers, which is no multiple of the target's hidden"),
        ({}, {"fc.weight": None}, "fc.weight is missing"),
        ({"vocab_size": 41}, {}, "its vocabulary has 41 tokens, and the target's has 40"),
        ({"draft_vocab_size": 13}, {}, "lm_head.weight (12x16 in place of 13x16)"),
        ({"target_hidden_size": 32}, {}, "it was trained for a hidden size of 32, and the target's is 16"),
        ({}, {"d2t": None}, "no d2t says which"),
        ({}, {"d2t": torch.arange(VD - 1)}, "its d2t has 11 entries, and it drafts 12 tokens"),
        ({}, {"d2t": torch.arange(VD) * 3}, "its d2t gives no 12 different tokens of the target's 40"),
        ({}, {"d2t": torch.zeros(VD, dtype=torch.int64)}, "its d2t and t2d name different tokens"),
        ({"num_aux_hidden_states": 4}, {}, "num_aux_hidden_states 4, and its fc reads 3"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, "sets both norm_before_fc and fc_norm"),
        ({"fc_norm": True}, {}, "fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight are missing"),
        ({"kv_lora_rank": 512}, {}, "of the kind MLA"),
        ({"rope_scaling": {"type": "longrope"}}, {}, "rotary embeddings are of type longrope"),
        ({"rope_scaling": {"type": "linear"}}, {}, "rotary embeddings of type linear have no factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5}}}, {}, "its layers have different rotary embeddi"),
        ({"partial_rotary_factor": 0.5}, {}, "it rotates a part of each head only"),
        ({"hidden_act": "wavy"}, {}, "its hidden_act is 'wavy'"),
        ({"num_attention_heads": "many"}, {}, "a value of another type or size than expected"),
        ({"hidden_size": None}, {}, "its config.json has no hidden_size"),
        ({"num_hidden_layers": 10**9}, {}, "num_hidden_layers is 1000000000, and no whole number from 1 to 1024"),
        ({"head_dim": 10**9}, {}, "head_dim is 1000000000, and no whole number from 1 to 1048576"),
        ({"num_key_value_heads": [2]}, {}, "num_key_value_heads is [2], and no whole number from 1 to 1048576"),
        ({"hidden_act": ["silu"]}, {}, "its config.json has a value of another type or size than expected"),
        ({"architectures": 5}, {}, "another type or size than expected ('int' object is not iterable); repair that"),
        ({"eagle_config": "x"}, {}, "its config.json has a value of another type or size than expected"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, "reads 3 hidden states of the target, and its config na"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 10]}, {}, "hidden states 2, 4, 10, and a target of 9 layers"),
        ({"speculators_model_type": "medusa"}, {}, "what is wanted is an EAGLE-3 head or a P-EAGLE head"),
        ({"speculators_model_type": "peagle"}, {}, "it drafts in parallel, and its mask_token_id is None"),
        ({"mask_token_id": V}, {"mask_hidden": torch.ones(1, 1, 3 * H)}, "its mask_token_id is 40; that must be"),
        ({"mask_token_id": 3}, {"mask_hidden": torch.ones(1, 1, H)}, "mask_hidden (1x1x16 in place of 1x1x48)"),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "mamba"}},
            {},
            "its layers are those of mamba",
        ),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": "wide"}},
            {},
            "Transformers does not take its transformer_layer_config",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(config: Any, change: Any, words: str, tmp_path: Path) -> None:
    assert words in refusal(lambda: load(write_head(tmp_path, CONFIG | config, changed(head_weights(), change))))


def test_a_head_without_what_it_would_borrow_must_be_as_wide_as_its_target(tmp_path: Path) -> None:
    weights = head_weights() | {"fc.weight": torch.ones(H, 60)}
    path = write_head(tmp_path, CONFIG, weights)
    with pytest.raises(ConfigError, match="would use the target's embed_tokens, of size 20"):
        load(path, target=TargetSizes(V, 20, 9))
