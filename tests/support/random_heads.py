"""EAGLE heads that know nothing, for the target of `tests.support.perfect_head`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch

from tests.support.heads import Weights, layer_weights, random_weights, write_head
from tests.support.perfect_head import DIM, EPS, NUM_LAYERS, SIZE, VOCAB

__all__ = ["DRAFTED", "RandomHead", "random_head"]

DRAFTED = [0, 1, 3, 4, 8]  # by the heads of EAGLE-3


class RandomHead(NamedTuple):
    """A head, and what its files hold."""

    path: str
    config: Mapping[str, Any]
    weights: Weights


@cache
def random_head(head: str) -> RandomHead:
    """A head of a kind. Those of EAGLE-3 and P-EAGLE read the target's streams 0 and 2. That of mtp is of its kind."""
    config = {"hidden_size": SIZE, "intermediate_size": 8, "num_attention_heads": 3, "num_key_value_heads": 1}
    config |= {"vocab_size": VOCAB, "rms_norm_eps": 1e-6}
    ids: Weights = {}
    if head == "eagle":
        shapes = {"fc.weight": (SIZE, 2 * SIZE), "fc.bias": (SIZE,)} | layer_weights("layers.0.", config, SIZE)
    elif head == "mtp":
        config |= {"intermediate_size": 4, "num_key_value_heads": 3, "head_dim": DIM, "rms_norm_eps": EPS}
        prefix = f"model.layers.{NUM_LAYERS}."
        norms = ("enorm", "hnorm", "input_layernorm", "shared_head.norm")
        shapes = {f"{prefix}{name}.weight": (SIZE,) for name in norms} | {f"{prefix}eh_proj.weight": (SIZE, 2 * SIZE)}
        shapes |= layer_weights(prefix, config, SIZE) | {f"{prefix}shared_head.head.weight": (VOCAB, SIZE)}
    else:
        config |= {"draft_vocab_size": len(DRAFTED), "eagle_aux_hidden_state_layer_ids": [0, 2]}
        shapes = {f"midlayer.{name}.weight": (SIZE,) for name in ("input_layernorm", "hidden_norm")}
        shapes |= {"fc.weight": (SIZE, 2 * SIZE), "norm.weight": (SIZE,), "lm_head.weight": (len(DRAFTED), SIZE)}
        shapes |= layer_weights("midlayer.", config, 2 * SIZE)
        ids = {"d2t": torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))}
    if head == "peagle":
        config |= {"pard_token": 7}
        shapes |= {"mask_hidden": (1, 1, 2 * SIZE), "embed_tokens.weight": (VOCAB, SIZE)}
    weights = random_weights(shapes) | ids
    return RandomHead(write_head(Path(mkdtemp(prefix="emssd-head-")), config, weights), config, weights)
