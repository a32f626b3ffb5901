"""A target, and heads for it, all made by hand, that agree on every token if a head is fed rightly.

The target's next token depends on its last three. What it keeps of them in its residual stream is another thing after
each of its layers. A head takes one of the three from the embedding beside it, one from the feature, and one from the
KV of the pair before, and nothing from elsewhere.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from emssd_testing.models import tiny_model

from tests.support.heads import Weights, blank_weights, eagle3_shapes, layer_weights, write_head

VOCAB = 9
UNDRAFTED = (2, 5)  # which the target never says, and the head cannot draft
DIM, SIZE = 10, 3 * VOCAB + 3  # of an attention head; of the stream: three tokens, and a one at the end
NUM_LAYERS, EPS, THETA = 3, 1e-12, 10000.0
MOVED = torch.eye(VOCAB)[[4, 2, 0, 7, 8, 1, 3, 5, 6]]  # a permutation of tokens, without a fixed point
ONE = SIZE - 1
LAYER = {"hidden_size": SIZE, "intermediate_size": 4, "num_attention_heads": 3, "head_dim": DIM}  # of the target


def _tables() -> torch.Tensor:
    """``[VOCAB, SIZE]`` the logits that each of the last three tokens adds, the latest first."""
    table = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(179), dtype=torch.float64)
    table[:, 3 * VOCAB :] = 0
    table[list(UNDRAFTED), ONE] = -100
    return table


def _block(number: int) -> slice:
    return slice(number * VOCAB, (number + 1) * VOCAB)


def _looks_back(distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[DIM]`` query and key that meet at tokens that are so far apart, and nowhere else nearly as well."""
    angles = distance * THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    strength = math.sqrt(400 * math.sqrt(DIM))
    key = torch.cat([torch.ones(DIM // 2), torch.zeros(DIM // 2)]).double()
    return strength * torch.cat([angles.cos(), -angles.sin()]), strength * key


def _heads(
    weights: Weights, prefix: str, wanted: list[tuple[int, int, float]], one: tuple[int, float], size: int
) -> None:
    """Attention heads that each copy a token from elsewhere.

    Args:
        weights: to be added to.
        prefix: of their names.
        wanted: of each the distance it looks back, where the token stands in what it reads, and how large it is there.
        one: where a constant stands in what it reads, and how large it is.
        size: of what it reads.
    """
    projections = {name: torch.zeros(len(wanted) * DIM, size, dtype=torch.float64) for name in "qkv"}
    for head, (distance, start, scale) in enumerate(wanted):
        rows = slice(head * DIM, (head + 1) * DIM)
        query, key = _looks_back(distance)
        projections["q"][rows, one[0]] = query / one[1]
        projections["k"][rows, one[0]] = key / one[1]
        projections["v"][head * DIM : head * DIM + VOCAB, start : start + VOCAB] = torch.eye(VOCAB) / scale
    weights |= {f"{prefix}self_attn.{name}_proj.weight": weight for name, weight in projections.items()}


def _put(out: torch.Tensor, head: int, block: int, matrix: torch.Tensor) -> None:
    """Add `matrix` of the token that `head` copies to a block of the stream."""
    out[_block(block), head * DIM : head * DIM + VOCAB] += matrix


def blank_llama(size: int, num_layers: int, heads: int, **options: Any) -> tuple[Any, Weights]:
    """A Llama in float64, and weights to fill it with: zeros, and ones for norms."""
    sizes = {"hidden_size": size, "num_hidden_layers": num_layers, "num_attention_heads": heads, "head_dim": DIM}
    more = {"num_key_value_heads": heads, "intermediate_size": 4, "rms_norm_eps": EPS, "tie_word_embeddings": False}
    model: Any = tiny_model("llama", **sizes, **more, **options)
    return model, blank_weights({name: tuple(weight.shape) for name, weight in model.state_dict().items()})


def perfect_target(max_model_len: int = 128) -> Any:
    """The target, in float64: a Llama whose logits are a sum over its last three tokens.

    Its stream holds the token after layer 0. Layer 1 adds the two before it, and permutes the token. Layer 2 permutes
    it again.
    """
    model, weights = blank_llama(SIZE, NUM_LAYERS, 3, vocab_size=VOCAB, max_model_len=max_model_len)
    embeddings = torch.zeros(VOCAB, SIZE, dtype=torch.float64)
    embeddings[:, _block(0)], embeddings[:, ONE] = torch.eye(VOCAB), 1
    eye = torch.eye(VOCAB)
    for layer, length in ((1, 2), (2, 4)):  # so many ones are in the stream that it reads
        scale, prefix = math.sqrt(SIZE / length), f"model.layers.{layer}."
        _heads(weights, prefix, [(distance, 0, scale) for distance in range(3)], (ONE, scale), SIZE)
        out = torch.zeros(SIZE, 3 * DIM, dtype=torch.float64)
        _put(out, 0, 0, MOVED - eye)
        if layer == 1:
            _put(out, 1, 1, eye)
            _put(out, 2, 2, eye)
        weights[f"{prefix}self_attn.o_proj.weight"] = out
    table = _tables() / math.sqrt(SIZE / 4)
    table[:, _block(0)] = table[:, _block(0)] @ (MOVED @ MOVED).T.double()
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": table}
    model.load_state_dict(weights)
    return model


def write_perfect_eagle3(folder: Path, **config: Any) -> str:
    """Write an EAGLE-3 head for `perfect_target`. It reads the streams 1, 2 and 3. Returns its path.

    A feature holds three tokens, as the stream of the target does. A wrong one of the three streams spoils it.
    """
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": SIZE,
        "intermediate_size": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB - len(UNDRAFTED),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    drafted = [token for token in range(VOCAB) if token not in UNDRAFTED]
    fc = torch.zeros(SIZE, 3 * SIZE, dtype=torch.float64)
    back, eye = MOVED.T.double(), torch.eye(VOCAB, dtype=torch.float64)
    fc[_block(0), :VOCAB] = -4 * eye  # one of the three is right, and the others differ from it by nothing
    fc[_block(0), SIZE : SIZE + VOCAB] = 8 * back
    fc[_block(0), 2 * SIZE : 2 * SIZE + VOCAB] = -3 * back @ back
    for element in range(VOCAB, SIZE):
        fc[element, SIZE + element] = 1
    embedded, featured = math.sqrt(SIZE / 2), math.sqrt(SIZE / 4)
    places = [(0, 0, embedded), *((0, SIZE + block * VOCAB, featured) for block in range(3)), (1, SIZE, featured)]
    out = torch.zeros(SIZE, 5 * DIM, dtype=torch.float64)
    for block, new, old in ((0, 0, 1), (1, 1, 2), (2, 4, 3)):  # heads that copy the new and the old token
        _put(out, new, block, eye)
        _put(out, old, block, -eye)
    weights = blank_weights(eagle3_shapes(values, 3)) | {
        "fc.weight": fc,
        "lm_head.weight": (_tables() / featured)[drafted],
        "d2t": torch.tensor(drafted) - torch.arange(len(drafted)),
        "midlayer.self_attn.o_proj.weight": out,
    }
    _heads(weights, "midlayer.", places, (ONE, embedded), 2 * SIZE)
    return write_head(folder, values | config, {name: weight.contiguous() for name, weight in weights.items()})


def write_perfect_eagle(folder: Path, **config: Any) -> str:
    """Write an EAGLE-1 head for `perfect_target`. Returns its path.

    A feature is the target's last hidden state, whose norm made it larger by a factor that the head's output has, too.
    """
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": SIZE,
        "intermediate_size": 4,
        "num_attention_heads": 1,
        "head_dim": DIM,
        "vocab_size": VOCAB,
    }
    normed, back = math.sqrt(SIZE / 4), (MOVED @ MOVED).T.double()  # the token is moved twice in the last stream
    fc = torch.zeros(SIZE, 2 * SIZE, dtype=torch.float64)
    fc[_block(0), :VOCAB] = normed * back.T
    fc[_block(1), SIZE : SIZE + VOCAB] = back
    fc[ONE, ONE] = normed
    out = torch.zeros(SIZE, DIM, dtype=torch.float64)
    _put(out, 0, 2, torch.eye(VOCAB))
    weights = blank_weights(layer_weights("layers.0.", values, SIZE))
    weights |= {"fc.weight": fc, "layers.0.self_attn.o_proj.weight": out}
    _heads(weights, "layers.0.", [(1, VOCAB, 1.0)], (ONE, normed), SIZE)
    return write_head(folder, values | config, weights)


def write_perfect_mtp(folder: Path, **config: Any) -> str:
    """Write a layer for multi-token prediction for `perfect_target`, in DeepSeek's layout. Returns its path.

    The norm of features turns the sign of one token, so no other norm can stand in its place.
    """
    embedded, featured, fused = (math.sqrt(SIZE / ones) for ones in (2, 4, 3))
    back, prefix = (MOVED @ MOVED).T.double(), f"model.layers.{NUM_LAYERS}."
    projection = torch.zeros(SIZE, 2 * SIZE, dtype=torch.float64)
    projection[_block(0), :VOCAB] = back.T / embedded
    projection[_block(1), SIZE : SIZE + VOCAB] = -back / featured
    projection[ONE, ONE] = 1 / embedded
    turned = torch.ones(SIZE)
    turned[_block(0)] = -1
    out = torch.zeros(SIZE, 3 * DIM, dtype=torch.float64)
    _put(out, 0, 2, torch.eye(VOCAB))
    norms = {f"{prefix}{name}.weight": (SIZE,) for name in ("enorm", "input_layernorm", "shared_head.norm")}
    weights = blank_weights(norms | layer_weights(prefix, LAYER, SIZE)) | {
        f"{prefix}eh_proj.weight": projection,
        f"{prefix}hnorm.weight": turned,
        f"{prefix}self_attn.o_proj.weight": out,
    }
    _heads(weights, prefix, [(1, VOCAB, fused)] * 3, (ONE, fused), SIZE)
    return write_head(folder, {"hidden_size": SIZE, "vocab_size": VOCAB} | config, weights)
