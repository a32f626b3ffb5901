"""A target whose next token depends on none of its newest ones, so that several tokens can be foreseen in one pass.

Made by hand, in float64. Each of its logits is a sum over the three tokens that are `DISTANCE` and more before. A model
of the same kind is a perfect PARD drafter, and a DFlash drafter can read all that it needs from hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from emssd.testing.models import tiny_model
from tests.support.heads import Weights, write_head

__all__ = ["BLOCK", "DISTANCE", "MASK", "SIZE", "VOCAB", "looking_back_model", "write_looking_back_block"]

WORDS = 9  # tokens that are ever said
VOCAB, MASK = WORDS + 2, WORDS + 1  # two ids beyond them have embeddings
DISTANCE = 3  # the nearest token that counts is so far before the newest one
BLOCK = DISTANCE + 2  # the longest block: its newest token and masks, each of which can be foreseen
DIM, SIZE = (
    10,
    4 * WORDS + 4,
)  # of an attention head; of the stream: four tokens, at the end whether it is a mask, and a one
NUM_LAYERS, EPS, THETA = 3, 1e-12, 10000.0
IS_MASK, ONE = SIZE - 2, SIZE - 1
MOVED = torch.eye(WORDS, dtype=torch.float64)[[4, 2, 0, 7, 8, 1, 3, 5, 6]]  # a permutation without a fixed point
EYE = torch.eye(WORDS, dtype=torch.float64)


def _block(number: int) -> slice:
    return slice(number * WORDS, (number + 1) * WORDS)


def _copying(weights: Weights, prefix: str, distances: Seq[int], query: float, key: float) -> None:
    """Heads that each copy the token so far before.

    Args:
        weights: to be added to.
        prefix: of their names.
        distances: of each head.
        query, key: how large the constant is in what queries, and keys and values, are made of.
    """
    rows = len(distances) * DIM
    q, k, v = (torch.zeros(rows, SIZE, dtype=torch.float64) for _ in range(3))
    strength = math.sqrt(400 * math.sqrt(DIM))
    for head, distance in enumerate(distances):
        angles = distance * THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        own = slice(head * DIM, (head + 1) * DIM)
        q[own, ONE] = strength * torch.cat([angles.cos(), -angles.sin()]) / query
        k[own, ONE] = strength * torch.cat([torch.ones(DIM // 2), torch.zeros(DIM // 2)]).double() / key
        v[head * DIM : head * DIM + WORDS, _block(0)] = EYE / key
    weights |= {f"{prefix}self_attn.{name}_proj.weight": each for name, each in (("q", q), ("k", k), ("v", v))}


def _output(into: Mapping[int, tuple[int, torch.Tensor]], num_heads: int) -> torch.Tensor:
    """``[SIZE, num_heads * DIM]`` what is added to the stream: by head, the part of it and a matrix."""
    out = torch.zeros(SIZE, num_heads * DIM, dtype=torch.float64)
    for head, (block, matrix) in into.items():
        out[_block(block), head * DIM : head * DIM + WORDS] += matrix
    return out


def looking_back_model(vocab_size: int = VOCAB, mask: int = MASK, max_model_len: int = 128) -> Any:
    """The model: a Llama with `WORDS` tokens, a mask, and further ids of which it makes a mess and which it prefers.

    Its stream holds the token after layer 0. Layer 1 adds the three tokens that count, and permutes the token. Layer 2
    permutes it again.
    """
    sizes = {"hidden_size": SIZE, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4}
    more = {"head_dim": DIM, "intermediate_size": 4, "rms_norm_eps": EPS, "tie_word_embeddings": False}
    model: Any = tiny_model("llama", vocab_size=vocab_size, max_model_len=max_model_len, **sizes, **more)
    weights: Weights = {
        name: torch.ones_like(each) if "norm" in name else torch.zeros_like(each)
        for name, each in model.state_dict().items()
    }
    generator = torch.Generator().manual_seed(7)
    embeddings = 9 * torch.randn(vocab_size, SIZE, generator=generator, dtype=torch.float64)
    embeddings[:, ONE] = 0
    for token in (*range(WORDS), mask):
        embeddings[token] = 0
        embeddings[token, ONE] = embeddings[token, IS_MASK if token == mask else token] = 1
    for layer, length in ((1, 2), (2, 5)):  # so many ones are in the stream that it reads
        scale, prefix = math.sqrt(SIZE / length), f"model.layers.{layer}."
        _copying(weights, prefix, [0, *range(DISTANCE, DISTANCE + 3)], scale, scale)
        copied = {head: (head, EYE) for head in (1, 2, 3)} if layer == 1 else {}
        weights[f"{prefix}self_attn.o_proj.weight"] = _output({0: (0, MOVED - EYE), **copied}, 4)
    table = torch.randn(vocab_size, SIZE, generator=torch.Generator().manual_seed(179), dtype=torch.float64)
    table[:, _block(0)] = table[:, IS_MASK:] = 0
    table[WORDS:VOCAB, ONE] = -100  # never said
    table[VOCAB:, ONE] = 100  # what no target has
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": table / math.sqrt(SIZE / 5)}
    model.load_state_dict(weights)
    return model


def write_looking_back_block(folder: Path, **config: Any) -> str:
    """Write a DFlash drafter for the model. Returns its path.

    It reads the outputs of all three layers, and a wrong one of them spoils what it sees. Layer 0 copies the two nearer
    of the tokens that count, and layer 1 the third. The last slot of a block finds its nearest one at the block's
    beginning, and nowhere else.
    """
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": SIZE,
        "intermediate_size": 4,
        "num_hidden_layers": 2,
        "num_target_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]},
    }
    fc = torch.zeros(SIZE, 3 * SIZE, dtype=torch.float64)
    back = MOVED.T
    fc[_block(0), :WORDS] = -4 * EYE
    fc[_block(0), SIZE : SIZE + WORDS] = 8 * back
    fc[_block(0), 2 * SIZE : 2 * SIZE + WORDS] = -3 * back @ back
    fc[IS_MASK, IS_MASK] = fc[ONE, ONE] = 1
    weights: Weights = {"fc.weight": fc, "hidden_norm.weight": torch.ones(SIZE), "norm.weight": torch.ones(SIZE)}
    known = math.sqrt(SIZE / 2)  # what a one is in the features, and in an embedding
    for layer, query, heads in ((0, known, (0, 1)), (1, math.sqrt(SIZE / 4), (2,))):
        prefix = f"layers.{layer}."
        distances = [DISTANCE + 1 + head for head in heads]
        _copying(weights, prefix, [*distances, *[0] * (2 - len(heads))], query, known)
        copied = {place: (head + 1, EYE) for place, head in enumerate(heads)}
        weights[f"{prefix}self_attn.o_proj.weight"] = _output(copied, 2)
        for name, shape in (("gate", (4, SIZE)), ("up", (4, SIZE)), ("down", (SIZE, 4))):
            weights[f"{prefix}mlp.{name}_proj.weight"] = torch.zeros(shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(SIZE)
    return write_head(folder, values | config, {name: each.contiguous() for name, each in weights.items()})
