"""Hydra heads of both architectures give what their formulas say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads.config import LAST_NORMED, TargetSizes
from emssd_heads.hydra.drafter import load_hydra

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

H, V, HEADS, LAYERS = 16, 40, 4, 9
TARGET_CONFIG: dict[str, Any] = SMALL | {"num_hidden_layers": LAYERS, "rope_theta": 20000.0}
load = partial(load_hydra, target=TargetSizes(V, H, LAYERS, torch.float64), target_config=TARGET_CONFIG)
CONFIG: dict[str, Any] = {
    "hydra_num_heads": HEADS,
    "hydra_num_layers": 1,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "x",
}
PREFIX = "prefix_embeding_layer."


def head_weights(num_layers: int = 1, *, dropout: bool = False) -> Weights:
    """Of the architecture mlp, or with the numbers that dropout modules leave to prefix-mlp."""
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(HEADS):
        for layer in range(num_layers):
            stem = f"hydra_mlp.{h}.{2 * layer + 1 if dropout else layer}"
            parts = ("linear",) if layer else ("linear", "res_connection")
            for part in parts:
                shapes |= {f"{stem}.{part}.weight": (H, H if layer else (h + 2) * H), f"{stem}.{part}.bias": (H,)}
        behind = f"hydra_lm_head.{h}{'.1' if dropout else ''}"
        shapes |= {f"{behind}.weight": (V, H), f"{behind}.bias": (V,)}
    return random_weights(shapes)


def prefix_weights() -> Weights:
    return random_weights(
        {
            f"{PREFIX}embed_tokens.weight": (V, H),
            f"{PREFIX}layers.0.input_layernorm.weight": (H,),
            **layer_weights(f"{PREFIX}layers.0.", TARGET_CONFIG, H),
            f"{PREFIX}norm.weight": (H,),
        },
        seed=3,
    )


def dense_logits(
    w: Weights, head: int, hidden: torch.Tensor, embeds: torch.Tensor, num_layers: int = 1, *, dropout: bool = False
) -> torch.Tensor:
    x = torch.cat([hidden, *embeds.unbind(1)], -1)
    w = {name: weight.double() for name, weight in w.items()}
    for layer in range(num_layers):
        stem = f"hydra_mlp.{head}.{2 * layer + 1 if dropout else layer}"
        y = x @ w[f"{stem}.linear.weight"].T + w[f"{stem}.linear.bias"]
        if not layer:
            x = x @ w[f"{stem}.res_connection.weight"].T + w[f"{stem}.res_connection.bias"]
        x = x + y * torch.sigmoid(y)
    behind = f"hydra_lm_head.{head}{'.1' if dropout else ''}"
    return x @ w[f"{behind}.weight"].T + w[f"{behind}.bias"]


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("dropout", [False, True])
def test_each_head_reads_the_tokens_before_its_own(num_layers: int, dropout: bool, tmp_path: Path) -> None:
    weights = head_weights(num_layers, dropout=dropout)
    arch = {"hydra_head_arch": "prefix-mlp"} if dropout else {}
    more = prefix_weights() if dropout else {}
    loaded = load(write_head(tmp_path, CONFIG | arch, weights | more, "hydra_lm_head.pt"))
    assert (loaded.prefix is not None) is dropout
    for head in range(HEADS):
        hidden, embeds = numbers(3, H), numbers(3, head + 1, H, seed=2)
        wanted = dense_logits(weights, head, hidden, embeds, num_layers, dropout=dropout)
        logits = loaded.head(head, torch.cat([hidden, embeds.flatten(1)], -1))
        assert_same(logits, wanted, 1e-10, 1e-10)


@pytest.mark.parametrize("backend", ["ragged", "padded"])
def test_the_prefix_layer_runs_in_batches(backend: str, tmp_path: Path) -> None:
    weights = prefix_weights()
    config = CONFIG | {"hydra_head_arch": "prefix-mlp"}
    path = write_head(tmp_path, config, head_weights(dropout=True) | weights, "hydra_lm_head.pt")
    prefix = load(path).prefix
    assert prefix is not None

    def dense(inputs: torch.Tensor) -> torch.Tensor:
        eps = TARGET_CONFIG["rms_norm_eps"]
        normed = dense_rms(inputs, weights[f"{PREFIX}layers.0.input_layernorm.weight"].double(), eps)
        out = dense_layer(weights, f"{PREFIX}layers.0.", TARGET_CONFIG, inputs, normed, range(len(inputs)))
        return dense_rms(out, weights[f"{PREFIX}norm.weight"].double(), eps)

    assert_ragged(prefix, drawn_rows(H), dense, backend)


def test_an_offset_counts_layers_from_the_end(tmp_path: Path) -> None:
    weights = head_weights()
    assert load(write_head(tmp_path / "0", CONFIG, weights, "hydra_lm_head.pt")).layers == (LAST_NORMED,)
    path = write_head(tmp_path / "2", CONFIG | {"hidden_state_offset": 2}, weights, "hydra_lm_head.pt")
    assert load(path).layers == (LAYERS - 2,)
    assert "residual stream before layer 7" in load(path).described[1]


@looped(
    "config, change, words",
    [
        ({}, {"hydra_mlp.3.0.res_connection.weight": None}, "layers.3.0.res_connection.weight is missing"),
        ({}, {"hydra_lm_head.1.weight": None}, "projections.1.weight is missing"),
        ({}, {"extra": torch.ones(1)}, "extra is without a place in such a head"),
        ({}, {"hydra_lm_head.0.bias": torch.ones(V + 1)}, "hydra_lm_head.0.bias (41 in place of"),
        ({}, dict.fromkeys(head_weights()), "none of its weights is the vocabulary projection of a head"),
        ({"hydra_head_arch": "prefix-mlp"}, {}, "and 7 more are missing"),
        ({"hydra_head_arch": "eagle-attn"}, {}, "its heads are of the architecture 'eagle-attn'"),
        ({"grounded_heads": False}, {}, "its heads do not read drafted tokens"),
        ({"hidden_state_offset": 10}, {}, "its hidden_state_offset is 10, and the target has 9 layers"),
    ],
)
def test_what_does_not_fit_is_one_sentence(config: Any, change: Any, words: str, tmp_path: Path) -> None:
    weights = changed(head_weights(), change)
    assert words in refusal(lambda: load(write_head(tmp_path, CONFIG | config, weights, "hydra_lm_head.pt")))
