"""Medusa heads in each published layout give what their formula says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_medusa.heads import MedusaHeads, load_medusa

from emssd.drafters.heads.loading import Loaded
from emssd.drafters.heads.target import TargetSizes
from emssd.drafters.heads.trees import read_trees
from emssd.errors import ConfigError
from tests.support.heads import Weights, numbers, random_weights, write_head

H, V, HEADS = 16, 40, 5
TARGET = TargetSizes(V, H, 9)
CONFIG: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}


def head_weights(num_layers: int = 1, num_tokens: int = V) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(HEADS):
        for layer in range(num_layers):
            shapes |= {f"{h}.{layer}.linear.weight": (H, H), f"{h}.{layer}.linear.bias": (H,)}
        shapes[f"{h}.{num_layers}.weight"] = (num_tokens, H)
    return random_weights(shapes)


def dense_logits(w: Weights, head: int, x: torch.Tensor, num_layers: int = 1) -> torch.Tensor:
    for layer in range(num_layers):
        y = x @ w[f"{head}.{layer}.linear.weight"].double().T
        if f"{head}.{layer}.linear.bias" in w:
            y = y + w[f"{head}.{layer}.linear.bias"].double()
        x = x + y * torch.sigmoid(y)
    return x @ w[f"{head}.{num_layers}.weight"].double().T


def load(path: str) -> Loaded[MedusaHeads]:
    return load_medusa(path, replace(TARGET, dtype=torch.float64))


def assert_same(loaded: Loaded[MedusaHeads], weights: Weights, num_layers: int = 1) -> None:
    x = numbers(3, H)
    wanted = torch.stack([dense_logits(weights, head, x, num_layers) for head in range(HEADS)])
    torch.testing.assert_close(loaded.head(x), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loaded.head(x, 2), wanted[:2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_files_of_heads_alone(num_layers: int, file: str, tmp_path: Path) -> None:
    weights = {name: each.half() for name, each in head_weights(num_layers).items()}
    loaded = load(write_head(tmp_path, CONFIG | {"medusa_num_layers": num_layers}, weights, file))
    assert_same(loaded, weights, num_layers)
    assert loaded.described[0].startswith("5 Medusa heads (its config says 2) of")


def test_heads_within_a_whole_model(tmp_path: Path) -> None:
    weights = head_weights()
    model = {"model.embed_tokens.weight": torch.ones(V, H), "lm_head.weight": torch.ones(V, H)}
    within = {f"medusa_head.{name}": each for name, each in weights.items()}
    assert_same(load(write_head(tmp_path, CONFIG, model | within)), weights)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_names_of_vllm_and_fewer_tokens(prefix: str, tmp_path: Path) -> None:
    weights = {name: each for name, each in head_weights(num_tokens=7).items() if not name.endswith("bias")}
    other = {f"{prefix}token_map": torch.arange(7) * 5}
    for h in range(HEADS):
        other[f"{prefix}blocks.{h}.layers.0.weight"] = weights[f"{h}.0.linear.weight"]
        other[f"{prefix}lm_heads.{h}.weight"] = weights[f"{h}.1.weight"]
    loaded = load(write_head(tmp_path, {"num_heads": HEADS, "truncated_vocab_size": 7}, other))
    assert_same(loaded, weights)
    assert loaded.head.target_ids is not None
    assert loaded.head.target_ids.tolist() == [0, 5, 10, 15, 20, 25, 30]
    other[f"{prefix}token_map"] = torch.arange(7) * 7
    with pytest.raises(ConfigError, match="its token_map gives no 7 different tokens"):
        load(write_head(tmp_path, {}, other))


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        ({}, lambda w: w.pop("3.0.linear.weight"), "heads.3.0.linear.weight is missing"),
        ({}, lambda w: w.pop("2.1.weight"), "heads.2.1.weight is missing"),
        ({}, lambda w: [w.pop(f"{h}.1.weight") for h in range(HEADS)], "none of its weights is the vocabulary proj"),
        ({}, lambda w: w.update(extra=torch.ones(1)), "extra is without a place in such a head"),
        ({}, lambda w: w.update({"0.1.weight": torch.ones(V + 1, H)}), "0.1.weight (41x16 in place of 40x16) is of"),
        ({}, lambda w: w.update({"0.0.linear.weight": torch.ones(8, 8)}), "(8x8 in place of 16x16)"),
        ({"original_lm_head": True}, None, "its heads share one vocabulary projection"),
        (
            {"speculators_model_type": "eagle3"},
            None,
            "what it holds is an EAGLE-3 head; what is wanted is Medusa heads",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(config: Any, change: Any, words: str, tmp_path: Path) -> None:
    weights = head_weights()
    if change is not None:
        change(weights)
    with pytest.raises(ConfigError) as raised:
        load(write_head(tmp_path, CONFIG | config, weights, "medusa_lm_head.pt"))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_authors_trees_come_along() -> None:
    trees = read_trees("emssd_medusa")
    assert len(trees) == 9
    for tree in trees.values():
        assert len(tree) == 63
        assert max(map(len, tree)) <= HEADS
        assert max(map(max, tree)) == 9
