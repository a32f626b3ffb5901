"""Files of random weights for drafters with trained parts, which fit any target, and a store of random text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import torch
from emssd_rest.build import build_store

from emssd.drafting import DrafterContext
from tests.support.heads import layer_weights, random_weights, write_head

__all__ = [
    "random_adapter",
    "random_block_head",
    "random_eagle",
    "random_hydra",
    "random_layer",
    "random_medusa",
    "random_store",
]


def random_medusa(context: DrafterContext) -> str:
    """Three heads."""
    assert context.target is not None
    size, vocab_size = context.target.hidden_size, context.vocab_size
    layers = {f"{head}.0.linear.weight": (size, size) for head in range(3)}
    shapes = layers | {f"{head}.1.weight": (vocab_size, size) for head in range(3)}
    return write_head(Path(mkdtemp(prefix="emssd-head-")), {}, random_weights(shapes), "medusa_lm_head.pt")


def random_hydra(context: DrafterContext) -> str:
    """Three heads behind a prefix layer."""
    assert context.target is not None
    size, vocab_size, prefix = context.target.hidden_size, context.vocab_size, "prefix_embeding_layer."
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}norm.weight": (size,)}
    shapes |= layer_weights(f"{prefix}layers.0.", context.target.config, size)
    shapes[f"{prefix}layers.0.input_layernorm.weight"] = (size,)
    for head in range(3):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.1.{part}.weight"] = (size, (head + 2) * size)
        shapes |= {f"hydra_lm_head.{head}.1.weight": (vocab_size, size), f"hydra_lm_head.{head}.1.bias": (vocab_size,)}
    config = {"hydra_head_arch": "prefix-mlp"}
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, random_weights(shapes), "hydra_lm_head.pt")


def random_eagle(context: DrafterContext, kind: str) -> str:
    """A head of EAGLE; that of EAGLE-3 reads two hidden states, and drafts all tokens of the target but the first."""
    assert context.target is not None
    return _written_head(kind, context.target.hidden_size, context.vocab_size)


@cache
def _written_head(kind: str, size: int, vocab_size: int) -> str:
    config = {
        "hidden_size": size,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
    }
    shapes = {"fc.weight": (size, 2 * size)}
    if kind == "eagle":
        weights = random_weights(shapes | layer_weights("layers.0.", config, size))
        return write_head(Path(mkdtemp(prefix="emssd-head-")), config, weights)
    config |= {"draft_vocab_size": vocab_size - 1, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    shapes |= {
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        **layer_weights("midlayer.", config, 2 * size),
        "norm.weight": (size,),
        "lm_head.weight": (vocab_size - 1, size),
    }
    ids = {"d2t": torch.ones(vocab_size - 1, dtype=torch.int64)}
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, random_weights(shapes) | ids)


def random_adapter(context: DrafterContext) -> str:
    """An adapter of Kangaroo."""
    assert context.target is not None
    return _written_adapter(context.target.hidden_size)


@cache
def _written_adapter(size: int) -> str:
    config = {"hidden_size": size, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    shapes = {name: shape for name, shape in layer_weights("layers.0.", config, size).items() if "self_attn" in name}
    norms = {"layers.0.input_layernorm.weight": (size,), "norm.weight": (size,)}
    return write_head(Path(mkdtemp(prefix="emssd-adapter-")), config, random_weights(shapes | norms))


def random_layer(context: DrafterContext) -> str:
    """A layer for multi-token prediction."""
    assert context.target is not None
    values = context.target.config
    config = {**{name: values[name] for name in _SIZES}, "vocab_size": context.vocab_size}
    return _written_layer(tuple(config.items()), context.target.num_layers)


_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@cache
def _written_layer(config: tuple[tuple[str, int], ...], number: int) -> str:
    values, prefix = dict(config), f"model.layers.{number}."
    size = values["hidden_size"]
    norms = ("enorm", "hnorm", "input_layernorm", "shared_head.norm")
    shapes = {f"{prefix}{name}.weight": (size,) for name in norms} | {f"{prefix}eh_proj.weight": (size, 2 * size)}
    weights = random_weights(shapes | layer_weights(prefix, values, size))
    return write_head(Path(mkdtemp(prefix="emssd-layer-")), values, weights)


def random_block_head(context: DrafterContext) -> str:
    """A block drafter that reads two hidden states of the target."""
    assert context.target is not None
    return _written_block_head(context.target.hidden_size, context.vocab_size)


@cache
def _written_block_head(size: int, vocab_size: int) -> str:
    config = {
        "hidden_size": size,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
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
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, random_weights(shapes))


@cache
def random_store(vocab_size: int) -> str:
    """A store of random text in a small alphabet, so that something is found, and often wrong."""
    draw, folder = Random(0), Path(mkdtemp(prefix="emssd-store-")) / "store"
    build_store(folder, [[draw.randrange(min(vocab_size, 11)) for _ in range(300)] for _ in range(6)])
    return str(folder)
