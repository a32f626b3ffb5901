"""A target whose next token depends on none of its newest ones, so that several tokens can be foreseen in one pass.

Made by hand, in float64. Each of its logits is a sum over the three tokens that are `DISTANCE` and more before. A model
of the same kind is a perfect PARD drafter, and a DFlash drafter can read all that it needs from hidden states.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from tests.support.heads import blank_weights, layer_weights, write_head
from tests.support.perfect_head import DIM, EPS, MOVED, THETA, _block, _heads, _put, blank_llama
from tests.support.perfect_head import VOCAB as WORDS  # tokens that are ever said

VOCAB, MASK = WORDS + 2, WORDS + 1  # two ids beyond them have embeddings
DISTANCE = 3  # the nearest token that counts is so far before the newest one
BLOCK = DISTANCE + 2  # the longest block: its newest token and masks, each of which can be foreseen
SIZE = 4 * WORDS + 4  # of the stream: four tokens, at the end whether it is a mask, and a one
NUM_LAYERS = 3
IS_MASK, ONE = SIZE - 2, SIZE - 1
EYE = torch.eye(WORDS, dtype=torch.float64)


def looking_back_model(vocab_size: int = VOCAB, mask: int = MASK, max_model_len: int = 128) -> Any:
    """The model: a Llama with `WORDS` tokens, a mask, and further ids of which it makes a mess and which it prefers.

    Its stream holds the token after layer 0. Layer 1 adds the three tokens that count, and permutes the token. Layer 2
    permutes it again.
    """
    model, weights = blank_llama(SIZE, NUM_LAYERS, 4, vocab_size=vocab_size, max_model_len=max_model_len)
    generator = torch.Generator().manual_seed(7)
    embeddings = 9 * torch.randn(vocab_size, SIZE, generator=generator, dtype=torch.float64)
    embeddings[:, ONE] = 0
    for token in (*range(WORDS), mask):
        embeddings[token] = 0
        embeddings[token, ONE] = embeddings[token, IS_MASK if token == mask else token] = 1
    for layer, length in ((1, 2), (2, 5)):  # so many ones are in the stream that it reads
        scale, prefix = math.sqrt(SIZE / length), f"model.layers.{layer}."
        distances = [0, *range(DISTANCE, DISTANCE + 3)]
        _heads(weights, prefix, [(distance, 0, scale) for distance in distances], (ONE, scale), SIZE)
        out = torch.zeros(SIZE, 4 * DIM, dtype=torch.float64)
        _put(out, 0, 0, MOVED - EYE)
        for head in (1, 2, 3) if layer == 1 else ():
            _put(out, head, head, EYE)
        weights[f"{prefix}self_attn.o_proj.weight"] = out
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
    back = MOVED.T.double()
    fc[_block(0), :WORDS] = -4 * EYE
    fc[_block(0), SIZE : SIZE + WORDS] = 8 * back
    fc[_block(0), 2 * SIZE : 2 * SIZE + WORDS] = -3 * back @ back
    fc[IS_MASK, IS_MASK] = fc[ONE, ONE] = 1
    weights = blank_weights({"hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}) | {"fc.weight": fc}
    known = math.sqrt(SIZE / 2)  # what a one is in the features, and in an embedding
    for layer, query, heads in ((0, known, (0, 1)), (1, math.sqrt(SIZE / 4), (2,))):
        prefix = f"layers.{layer}."
        distances = [*(DISTANCE + 1 + head for head in heads), *[0] * (2 - len(heads))]
        norm = {f"{prefix}input_layernorm.weight": (SIZE,)}
        weights |= blank_weights(norm | layer_weights(prefix, values, SIZE))
        _heads(weights, prefix, [(distance, 0, known) for distance in distances], (ONE, known), SIZE)
        weights[f"{prefix}self_attn.q_proj.weight"] *= known / query
        out = torch.zeros(SIZE, 2 * DIM, dtype=torch.float64)
        for place, head in enumerate(heads):
            _put(out, place, head + 1, EYE)
        weights[f"{prefix}self_attn.o_proj.weight"] = out
    return write_head(folder, values | config, {name: each.contiguous() for name, each in weights.items()})
