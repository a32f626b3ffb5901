"""EAGLE-1 and EAGLE-2 heads give what their formulas say, dense and in batches with trees."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads.config import TargetSizes
from emssd_heads.eagle.head import load_eagle

from tests.support.heads import (
    SMALL,
    Weights,
    assert_ragged,
    assert_same,
    changed,
    dense_layer,
    dense_rms,
    drawn_rows,
    layer_weights,
    numbers,
    random_weights,
    refusal,
    write_head,
)
from tests.support.tiers import looped

H, V = 16, 40
load = partial(load_eagle, target=TargetSizes(V, H, 9, torch.float64))
CONFIG: dict[str, Any] = SMALL | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": V,
}


def head_weights(config: dict[str, Any] = CONFIG) -> Weights:
    shapes = {"embed_tokens.weight": (V, H), "fc.weight": (H, 2 * H), "fc.bias": (H,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= layer_weights(f"layers.{layer}.", config, H)
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (H,)
    return random_weights(shapes)


def dense_outputs(w: Weights, inputs: torch.Tensor, config: dict[str, Any] = CONFIG) -> torch.Tensor:
    h = inputs @ w["fc.weight"].double().T
    if "fc.bias" in w:
        h = h + w["fc.bias"].double()
    attended, positions = h, range(len(h))
    for layer in range(config["num_hidden_layers"]):
        if layer:
            attended = dense_rms(h, w[f"layers.{layer}.input_layernorm.weight"].double(), config["rms_norm_eps"])
        h = dense_layer(w, f"layers.{layer}.", config, h, attended, positions)
    return h


@pytest.mark.parametrize("backend", ["ragged", "padded"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    ("bias", "file", "dtype"),
    [(True, "pytorch_model.bin", torch.float16), (False, "model.safetensors", torch.bfloat16)],
)
def test_rows_with_trees_run_together_as_each_way_alone(
    backend: str, num_layers: int, bias: bool, file: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = CONFIG | {"num_hidden_layers": num_layers}
    weights = {name: weight.to(dtype) for name, weight in head_weights(config).items() if bias or name != "fc.bias"}
    head = load(write_head(tmp_path, config, weights, file)).head
    assert_ragged(head, drawn_rows(2 * H), lambda inputs: dense_outputs(weights, inputs, config), backend)


def test_embeddings_are_the_files_or_the_targets_and_logits_the_targets(tmp_path: Path) -> None:
    weights, table = head_weights(), numbers(V, H)
    whole = load(write_head(tmp_path / "own", CONFIG, weights))
    ids = torch.tensor([[7, 3]])
    assert_same(whole.head.embed(ids, pytest.fail), weights["embed_tokens.weight"].double()[ids])
    del weights["embed_tokens.weight"], weights["fc.bias"]
    bare = load(write_head(tmp_path / "bare", CONFIG, weights))
    assert_same(bare.head.embed(ids, lambda ids: table[ids]), table[ids])
    assert_same(bare.head.logits(numbers(3, H), lambda x: x @ table.T), numbers(3, H) @ table.T)
    assert ("fc has a bias" in whole.described, "fc has no bias" in bare.described) == (True, True)


@looped(
    "config, change, words",
    [
        ({}, {"layers.0.mlp.up_proj.weight": None}, "of its weights, layers.0.mlp.up_proj.weight is missing"),
        ({}, {"norm.weight": torch.ones(H)}, "norm.weight is without a place in such a head"),
        ({}, {"fc.weight": torch.ones(H, H)}, "fc.weight (16x16 in place of 16x32) is of another"),
        ({"bias": True}, {"fc.bias": None}, "says that fc has a bias, and fc.bias is missing"),
        ({"hidden_size": 32}, {}, "it has a hidden size of 32, and the target's is 16"),
        ({"vocab_size": 41}, {}, "its vocabulary has 41 tokens, and the target's has 40"),
        ({}, {"d2t": torch.zeros(4)}, "what it holds is an EAGLE-3 head; what is wanted is an EAGLE-1"),
    ],
)
def test_what_does_not_fit_is_one_sentence(config: Any, change: Any, words: str, tmp_path: Path) -> None:
    assert words in refusal(lambda: load(write_head(tmp_path, CONFIG | config, changed(head_weights(), change))))
