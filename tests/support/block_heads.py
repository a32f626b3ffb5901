"""Small block drafters with random weights in each published layout, for one target."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from emssd_heads.dflash import DFlashConfig, emssd_drafters
from emssd_testing.models import tiny_model

from emssd.model import TargetModel
from tests.support.backends import context_of
from tests.support.heads import Weights, layer_weights, random_weights, write_head

VOCAB, SIZE = 17, 32
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB,
    "block_size": 5,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [2, 0]},
}
DSPARK = {"projector_type": "dspark", "markov_rank": 3, "sample_from_anchor": True, "enable_confidence_head": True}
NAMED: dict[str, Any] = {"architectures": ["DSparkDraftModel"]}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
Shapes = dict[str, tuple[int, ...]]
MARKOV: Shapes = {"markov_head.markov_w1.weight": (VOCAB, 3), "markov_head.markov_w2.weight": (VOCAB, 3)}
SURE: Shapes = {"confidence_head.proj.weight": (1, SIZE), "confidence_head.proj.bias": (1,)}
SURE_BY_TOKEN: Shapes = SURE | {"confidence_head.proj.weight": (1, SIZE + 3)}
GATE: Shapes = {"markov_head.gate_proj.weight": (3, SIZE + 3), "markov_head.gate_proj.bias": (3,)}
MEMORY: Shapes = {"markov_head.joint_proj.weight": (9, SIZE + 6), "markov_head.joint_proj.bias": (9,)}
TABLES: Shapes = {"embed_tokens.weight": (VOCAB, SIZE), "lm_head.weight": (VOCAB, SIZE)}
DFLASH2: Shapes = {
    "candidate_selector.predecessor_codebook": (VOCAB, 3),
    "candidate_selector.successor_codebook": (VOCAB, 3),
    "candidate_selector.hidden_projection.weight": (3, SIZE),
}
for part in ("attention_conv", "mlp_conv"):
    for layer in (0, 1):
        DFLASH2[f"layers.{layer}.{part}.base_kernel"] = (2, 3, SIZE)
        DFLASH2[f"layers.{layer}.{part}.kernel_projection.weight"] = (2 * 3 * 4, SIZE)
XPRESS: Shapes = {
    "refiner_head.token_embed.weight": (VOCAB, 3),
    "refiner_head.down_h.weight": (3, SIZE),
    "refiner_head.down_g.weight": (3, SIZE),
    "refiner_head.in_proj.weight": (3, 9),
    "refiner_head.mix_l": (3, 5, 5),
    "refiner_head.mlp_gate.weight": (6, 3),
    "refiner_head.mlp_up.weight": (6, 3),
    "refiner_head.mlp_down.weight": (3, 6),
    "refiner_head.readout.weight": (VOCAB, 3),
}
DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 3, "markov_head_type": "vanilla", "num_anchors": 512}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], Shapes]] = {
    "plain": ({}, {}, {}),
    "sliding": (SLIDING, {}, {}),
    "sliding without causality": (SLIDING | {"is_causal": False}, {}, {}),
    "sliding alone": (SLIDING | {"layer_types": ["sliding_attention"] * 2}, {}, {}),
    "causal": (SLIDING, {"causal": True}, {}),
    "scaled": ({}, {"input_embedding_scale": 3.0, "target_layer_ids": [-1, 2]}, {}),
    "from the anchor": ({}, {"sample_from_anchor": True}, {}),
    "dspark": (NAMED | {"block_size": 3}, DSPARK, MARKOV | SURE_BY_TOKEN),
    "dspark that is sure by itself": (NAMED, DSPARK, MARKOV | SURE),
    "dspark as DeepSpec has it": (DEEPSPEC, {}, MARKOV | TABLES),
    "dspark without confidence": (NAMED, DSPARK, MARKOV),
    "dspark with a gate": (NAMED, DSPARK | {"markov_head_type": "gated"}, MARKOV | GATE),
    "dspark with a memory": (NAMED, DSPARK | {"markov_head_type": "rnn"}, MARKOV | MEMORY),
    "dflash2": ({}, {"selector_top_k": 3, "is_causal": False}, DFLASH2),
    "xpress": ({}, {"num_jacobi_passes": 2}, XPRESS),
    "xpress from the anchor": ({}, {"num_jacobi_passes": 9, "sample_from_anchor": True}, XPRESS),
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {"fc.weight": (SIZE, 2 * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= layer_weights(prefix, config, SIZE) | {f"{prefix}input_layernorm.weight": (SIZE,)}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
    return shapes


@cache
def target() -> TargetModel:
    return TargetModel(tiny_model("qwen3", vocab_size=VOCAB, num_hidden_layers=4, max_model_len=64))


def written(folder: Path, kind: str) -> tuple[str, dict[str, Any], Weights]:
    top, inner, more = KINDS[kind]
    config = CONFIG | top | {"dflash_config": CONFIG["dflash_config"] | inner}
    weights = random_weights(shapes_of(config) | more, seed=3)
    return write_head(folder / "head", config, weights), config, weights


def contained(folder: Path, kind: str) -> tuple[str, dict[str, Any], Weights]:
    """The same for some of the target's tokens, in a container; the config is that of its authors."""
    _, config, weights = written(folder, kind)
    drafted = torch.tensor([0, 2, 3, 5, 8, 13])
    weights.setdefault("lm_head.weight", target().model.lm_head.weight.detach().float())
    for name in {"lm_head.weight", "markov_head.markov_w2.weight", "refiner_head.readout.weight"} & weights.keys():
        weights[name] = weights[name][drafted].contiguous()
    weights |= {"d2t": drafted - torch.arange(len(drafted)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    weights["t2d"][drafted] = True
    inner = config["dflash_config"]
    layers = {name: config[name] for name in config if name not in ("architectures", "dflash_config", "block_size")}
    container = {
        "speculators_model_type": kind if kind != "plain" else "dflash",
        "transformer_layer_config": layers | {"model_type": "qwen3"},
        "draft_vocab_size": len(drafted),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in inner["target_layer_ids"]],
        **{name: inner[name] for name in inner if name != "target_layer_ids"},
        "block_size": config["block_size"],
        "architectures": config["architectures"],
    }
    return write_head(folder / "container", container, weights), config, weights


def load(path: str, backend: str = "ragged", **options: Any) -> Any:
    (spec,) = emssd_drafters()
    return spec.build(DFlashConfig(path=path, **options), context_of(target(), backend, continuous=backend == "ragged"))
