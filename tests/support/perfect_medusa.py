"""A target and Medusa heads for it, both made by hand, that agree on every token if the heads are fed rightly.

Medusa heads do not know the token that the target chose last. So the target's next token depends on tokens that are
some places back, further than any head looks ahead. All of these stand in its last hidden state.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from tests.support.heads import Weights, write_head
from tests.support.perfect_head import DIM, UNDRAFTED, VOCAB, _block, _heads, _put, blank_llama

NUM_HEADS = 4
LAG, NUM_LAGS = NUM_HEADS + 1, 3  # the next token depends on the one so far back, and on the two before it
BLOCKS = LAG + NUM_LAGS - 1  # tokens in a hidden state, the latest first
SIZE = BLOCKS * VOCAB + 3  # a multiple of the attention heads
ONE = SIZE - 1
NORM = torch.ones(SIZE, dtype=torch.float64)
NORM[1::2] = -2  # a state that is not normed is another one


def lagging_target(sharpness: float = 1.0) -> Any:
    """The target, in float64: a Llama of one layer, whose attention copies tokens beside the latest one.

    A text must begin with at least `BLOCKS` tokens.
    """
    heads = BLOCKS - 1
    model, weights = blank_llama(SIZE, 1, heads, vocab_size=VOCAB, max_model_len=144)
    embeddings, scale = torch.zeros(VOCAB, SIZE, dtype=torch.float64), math.sqrt(SIZE / 2)
    embeddings[:, _block(0)], embeddings[:, ONE] = torch.eye(VOCAB), 1
    wanted = [(distance, 0, scale) for distance in range(1, BLOCKS)]
    _heads(weights, "model.layers.0.", wanted, (ONE, scale), SIZE)
    out = torch.zeros(SIZE, heads * DIM, dtype=torch.float64)
    for head in range(heads):
        _put(out, head, head + 1, torch.eye(VOCAB))
    weights |= {
        "model.layers.0.self_attn.o_proj.weight": out,
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": NORM,
        "lm_head.weight": _logits_of(LAG - 1, sharpness),
    }
    model.load_state_dict(weights)
    return model


def write_perfect_medusa(folder: Path, sharpness: float = 1.0, *, vllm: bool = False) -> str:
    """Write the heads for `lagging_target`. Returns their path.

    Args:
        folder: where to.
        sharpness: of the target.
        vllm: with the names of vLLM, and without the tokens that the target never says.
    """
    drafted = [token for token in range(VOCAB) if token not in UNDRAFTED] if vllm else list(range(VOCAB))
    weights: Weights = {"token_map": torch.tensor(drafted)} if vllm else {}
    for head in range(NUM_HEADS):
        layer, projection = (
            (f"blocks.{head}.layers.0", f"lm_heads.{head}") if vllm else (f"{head}.0.linear", f"{head}.1")
        )
        weights[f"{layer}.weight"] = torch.zeros(SIZE, SIZE)
        if not vllm:
            weights[f"{layer}.bias"] = torch.zeros(SIZE)
        # Seen from the same place, what counts for a token that is later by so many stands nearer by so many.
        weights[f"{projection}.weight"] = _logits_of(LAG - 2 - head, sharpness)[drafted]
    return write_head(folder, {}, weights, "model.safetensors" if vllm else "medusa_lm_head.pt")


def _logits_of(first: int, sharpness: float) -> torch.Tensor:
    """``[VOCAB, SIZE]`` from the last hidden state: logits that the tokens in the blocks from `first` on decide."""
    table = torch.randn(VOCAB, NUM_LAGS * VOCAB, generator=torch.Generator().manual_seed(83), dtype=torch.float64)
    logits = torch.zeros(VOCAB, SIZE, dtype=torch.float64)
    logits[:, first * VOCAB : (first + NUM_LAGS) * VOCAB] = table * sharpness
    logits[list(UNDRAFTED), ONE] = -100 * sharpness
    return logits / NORM / math.sqrt(SIZE / (BLOCKS + 1))
