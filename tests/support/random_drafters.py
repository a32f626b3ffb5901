"""Files of random weights for drafters with trained parts, which fit any target, and a store of random text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import torch
from emssd_rest.build import build_store

from emssd.drafting import DrafterContext
from tests.support.heads import Weights, eagle3_shapes, layer_weights, random_weights, write_head

__all__ = [
    "random_adapter",
    "random_block_head",
    "random_eagle",
    "random_hydra",
    "random_layer",
    "random_medusa",
    "random_store",
]

_WRITTEN: dict[str, str] = {}
_HEADS: dict[str, Any] = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


def _written(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], more: Weights | None = None, file: str = ""
) -> str:
    """The folder of the head whose weights have these shapes; written once."""
    key = f"{config} {shapes}"
    if key not in _WRITTEN:
        weights = random_weights(shapes) | (more or {})
        _WRITTEN[key] = write_head(Path(mkdtemp(prefix="emssd-head-")), config, weights, file or "model.safetensors")
    return _WRITTEN[key]


def _sizes(context: DrafterContext) -> tuple[int, int]:
    """Of hidden states and of the vocabulary."""
    assert context.target is not None
    return context.target.hidden_size, context.vocab_size


def random_medusa(context: DrafterContext) -> str:
    """Three heads."""
    size, vocab_size = _sizes(context)
    layers = {f"{head}.0.linear.weight": (size, size) for head in range(3)}
    shapes = layers | {f"{head}.1.weight": (vocab_size, size) for head in range(3)}
    return _written({}, shapes, file="medusa_lm_head.pt")


def random_hydra(context: DrafterContext) -> str:
    """Three heads after a prefix layer."""
    assert context.target is not None
    (size, vocab_size), prefix = _sizes(context), "prefix_embeding_layer."
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}norm.weight": (size,)}
    shapes |= layer_weights(f"{prefix}layers.0.", context.target.config, size)
    shapes[f"{prefix}layers.0.input_layernorm.weight"] = (size,)
    for head in range(3):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.1.{part}.weight"] = (size, (head + 2) * size)
        shapes |= {f"hydra_lm_head.{head}.1.weight": (vocab_size, size), f"hydra_lm_head.{head}.1.bias": (vocab_size,)}
    return _written({"hydra_head_arch": "prefix-mlp"}, shapes, file="hydra_lm_head.pt")


def random_eagle(context: DrafterContext, kind: str) -> str:
    """A head of EAGLE; that of EAGLE-3 reads two hidden states, and drafts all tokens of the target but the first."""
    size, vocab_size = _sizes(context)
    config = _HEADS | {"hidden_size": size, "vocab_size": vocab_size}
    if kind == "eagle":
        return _written(config, {"fc.weight": (size, 2 * size)} | layer_weights("layers.0.", config, size))
    config |= {"draft_vocab_size": vocab_size - 1, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    return _written(config, eagle3_shapes(config, 2), {"d2t": torch.ones(vocab_size - 1, dtype=torch.int64)})


def random_adapter(context: DrafterContext) -> str:
    """An adapter of Kangaroo."""
    size, _ = _sizes(context)
    config = _HEADS | {"hidden_size": size}
    shapes = {name: shape for name, shape in layer_weights("layers.0.", config, size).items() if "self_attn" in name}
    return _written(config, shapes | {"layers.0.input_layernorm.weight": (size,), "norm.weight": (size,)})


def random_layer(context: DrafterContext) -> str:
    """A layer for multi-token prediction."""
    assert context.target is not None
    (size, vocab_size), values = _sizes(context), context.target.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: values[name] for name in names} | {"vocab_size": vocab_size}
    prefix, norms = f"model.layers.{context.target.num_layers}.", ("enorm", "hnorm", "input_layernorm")
    shapes = {f"{prefix}{name}.weight": (size,) for name in (*norms, "shared_head.norm")}
    shapes[f"{prefix}eh_proj.weight"] = (size, 2 * size)
    return _written(config, shapes | layer_weights(prefix, config, size))


def random_block_head(context: DrafterContext) -> str:
    """A block drafter that reads two hidden states of the target."""
    size, vocab_size = _sizes(context)
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


@cache
def random_store(vocab_size: int) -> str:
    """A store of random text in a small alphabet, so that something is found, and often wrong."""
    draw, folder = Random(0), Path(mkdtemp(prefix="emssd-store-")) / "store"
    build_store(folder, [[draw.randrange(min(vocab_size, 11)) for _ in range(300)] for _ in range(6)])
    return str(folder)
