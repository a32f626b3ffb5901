"""Hydra heads for the target of `tests.support.perfect_head`, with which they agree if they are fed rightly."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from tests.support.heads import Weights, blank_weights, layer_weights, write_head
from tests.support.perfect_head import DIM, LAYER, MOVED, ONE, SIZE, VOCAB, _block, _heads, _put, _tables

NUM_HEADS = 4
PREFIX = "prefix_embeding_layer."


def write_perfect_hydra(folder: Path, *, prefix: bool = False) -> str:
    """Write the heads. Returns their path.

    The target's next token depends on its last three. A head takes them from the path, and what is missing there from
    the hidden state: the first head two of them, the second head one.

    Args:
        folder: where to.
        prefix: the second latest token in the hidden state is not looked at. A prefix layer takes it from the KV of the
            token before.
    """
    weights = _prefix_layer() if prefix else {}
    table = _tables()
    for head in range(NUM_HEADS):
        layer = f"hydra_mlp.{head}.{int(prefix)}"
        behind = f"hydra_lm_head.{head}{'.1' if prefix else ''}"
        for name in ("linear", "res_connection"):
            weights[f"{layer}.{name}.weight"] = torch.zeros(SIZE, (head + 2) * SIZE, dtype=torch.float64)
            weights[f"{layer}.{name}.bias"] = torch.zeros(SIZE)
        weights[f"{layer}.res_connection.weight"] = _last_three(head)
        weights[f"{behind}.weight"], weights[f"{behind}.bias"] = table.clone(), table[:, ONE].clone()
        weights[f"{behind}.weight"][:, ONE] = 0
    config = {"hydra_head_arch": "prefix-mlp" if prefix else "mlp", "grounded_heads": True}
    return write_head(folder, config, weights, "hydra_lm_head.pt")


def _last_three(head: int) -> torch.Tensor:
    """``[SIZE, (head + 2) * SIZE]`` the last three tokens, from a hidden state and the embeddings of a path."""
    matrices = torch.zeros(SIZE, (head + 2) * SIZE, dtype=torch.float64)
    moved_back = MOVED.T.double() @ MOVED.T.double()
    for back in range(3):
        if back <= head:
            start, matrix = (1 + head - back) * SIZE, torch.eye(VOCAB)
        else:
            before = back - head - 1
            start = before * VOCAB
            matrix = (torch.eye(VOCAB) if before else moved_back) / _SCALE
        matrices[_block(back), start : start + VOCAB] = matrix
    return matrices


_SCALE = math.sqrt(SIZE / 4)  # of a one in the target's last hidden state


def _prefix_layer() -> Weights:
    """It has the sizes of the target's layers."""
    layer, moved_back = f"{PREFIX}layers.0.", MOVED.T.double() @ MOVED.T.double()
    norms = {f"{layer}input_layernorm.weight": (SIZE,), f"{PREFIX}norm.weight": (SIZE,)}
    weights = blank_weights(norms | layer_weights(layer, LAYER, SIZE))
    weights[f"{PREFIX}embed_tokens.weight"] = torch.ones(VOCAB, SIZE)
    wanted = [(1, 0, _SCALE), (0, VOCAB, _SCALE), (0, 0, _SCALE)]
    _heads(weights, layer, wanted, (ONE, _SCALE), SIZE)
    out = torch.zeros(SIZE, 3 * DIM, dtype=torch.float64)
    _put(out, 0, 1, _SCALE * moved_back)  # what comes
    _put(out, 1, 1, -_SCALE * torch.eye(VOCAB))  # what goes
    weights[f"{layer}self_attn.o_proj.weight"] = out
    return weights
