"""Files of random weights for drafters with trained parts, which fit any target, and a store of random text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

import torch
from emssd_rest.build import build_store

from emssd.model import BorrowedTarget
from tests.support.heads import Weights, eagle3_shapes, layer_weights, new_folder, random_weights, write_head
from tests.support.right_drafters import target

_WRITTEN: dict[str, str] = {}
_HEADS: dict[str, Any] = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def _written(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    more: Weights | None = None,
    file: str = "",
    seed: int = 0,
) -> str:
    """The folder of the head whose weights have these shapes; written once."""
    key = f"{config} {shapes}"
    if key not in _WRITTEN:
        weights = random_weights(shapes, seed) | (more or {})
        _WRITTEN[key] = write_head(new_folder(), config, weights, file or "model.safetensors")
    return _WRITTEN[key]


def random_medusa(target: BorrowedTarget) -> str:
    """Three heads."""
    size, vocab_size = target.hidden_size, target.vocab_size
    layers = {f"{head}.0.linear.weight": (size, size) for head in range(3)}
    shapes = layers | {f"{head}.1.weight": (vocab_size, size) for head in range(3)}
    return _written({}, shapes, file="medusa_lm_head.pt")


def random_hydra(target: BorrowedTarget) -> str:
    """Three heads after a prefix layer."""
    size, vocab_size, prefix = target.hidden_size, target.vocab_size, "prefix_embeding_layer."
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}norm.weight": (size,)}
    shapes |= layer_weights(f"{prefix}layers.0.", target.config, size)
    shapes[f"{prefix}layers.0.input_layernorm.weight"] = (size,)
    for head in range(3):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.1.{part}.weight"] = (size, (head + 2) * size)
        shapes |= {f"hydra_lm_head.{head}.1.weight": (vocab_size, size), f"hydra_lm_head.{head}.1.bias": (vocab_size,)}
    return _written({"hydra_head_arch": "prefix-mlp"}, shapes, file="hydra_lm_head.pt")


def random_eagle(target: BorrowedTarget, kind: str, seed: int = 0) -> str:
    """A head of a kind of EAGLE; all but the first read two hidden states, and draft all tokens but the first."""
    size, vocab_size = target.hidden_size, target.vocab_size
    config = _HEADS | {"hidden_size": size, "vocab_size": vocab_size}
    if kind == "eagle":
        shapes = {"fc.weight": (size, 2 * size), "fc.bias": (size,)} | layer_weights("layers.0.", config, size)
        return _written(config, shapes)
    config |= {"draft_vocab_size": vocab_size - 1, "eagle_aux_hidden_state_layer_ids": [0, 2], "seed": seed}
    shapes = eagle3_shapes(config, 2)
    if kind == "peagle":
        config |= {"pard_token": vocab_size - 2}
        shapes |= {"mask_hidden": (1, 1, 2 * size), "embed_tokens.weight": (vocab_size, size)}
    return _written(config, shapes, {"d2t": torch.ones(vocab_size - 1, dtype=torch.int64)}, seed=seed)


def random_adapter(target: BorrowedTarget) -> str:
    """An adapter of Kangaroo."""
    size = target.hidden_size
    config = _HEADS | {"hidden_size": size}
    shapes = {name: shape for name, shape in layer_weights("layers.0.", config, size).items() if "self_attn" in name}
    return _written(config, shapes | {"layers.0.input_layernorm.weight": (size,), "norm.weight": (size,)})


def random_layer(target: BorrowedTarget) -> str:
    """A layer for multi-token prediction."""
    size, vocab_size, values = target.hidden_size, target.vocab_size, target.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: values[name] for name in names} | {"vocab_size": vocab_size}
    prefix, norms = f"model.layers.{target.num_layers}.", ("enorm", "hnorm", "input_layernorm")
    shapes = {f"{prefix}{name}.weight": (size,) for name in (*norms, "shared_head.norm")}
    shapes |= {f"{prefix}eh_proj.weight": (size, 2 * size), f"{prefix}shared_head.head.weight": (vocab_size, size)}
    return _written(config, shapes | layer_weights(prefix, config, size))


def random_block_head(target: BorrowedTarget) -> str:
    """A block drafter that reads two hidden states of the target."""
    size, vocab_size = target.hidden_size, target.vocab_size
    config = _HEADS | {
        "hidden_size": size,
        "block_size": 4,
        "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": [0, 1]},
    }
    shapes = {
        "fc.weight": (size, 2 * size),
        "hidden_norm.weight": (size,),
        "layers.0.input_layernorm.weight": (size,),
        **layer_weights("layers.0.", config, size),
        "norm.weight": (size,),
    }
    return _written(config, shapes)


def random_head(kind: str, seed: int = 0) -> str:
    """A layer for multi-token prediction, or a head of EAGLE, for the target of `tests.support.right_drafters`."""
    return (
        random_layer(BorrowedTarget(target())) if kind == "mtp" else random_eagle(BorrowedTarget(target()), kind, seed)
    )


@cache
def random_store(vocab_size: int) -> str:
    """A store of random text in a small alphabet, so that something is found, and often wrong."""
    draw, folder = Random(0), new_folder() / "store"
    build_store(folder, [[draw.randrange(min(vocab_size, 11)) for _ in range(300)] for _ in range(6)])
    return str(folder)
