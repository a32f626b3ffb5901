"""Tiny models with random weights, of every kind of attention that a config can ask for."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from emssd_testing.models import HYBRIDS, WideFloats, tiny_model

_NOTHING: dict[str, Any] = {}
_WINDOW: dict[str, Any] = {"sliding_window": "WINDOW"}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_CAPPED: dict[str, Any] = _WINDOW | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}

# What `tiny_model` does not set by itself; WINDOW, FULL and HALF are filled in by `draw_model`.
KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen3", "opt", "gpt2", "gpt_neox", "phi", "olmo2", "granite"), _NOTHING),
    **dict.fromkeys(("mistral", "ministral", "phi3", "olmo3", "starcoder2", "exaone4"), _WINDOW),
    **dict.fromkeys(("mixtral", "phimoe", "gpt_oss"), _WINDOW | _EXPERTS | {"num_local_experts": 4}),
    **dict.fromkeys(("gemma", "cohere"), _UNTIED),
    "qwen2": _WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": _EXPERTS | {"num_experts": 4},
    "gemma2": _CAPPED | _UNTIED,
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2} | _UNTIED,
    "vaultgemma": _CAPPED,
    "cohere2": _WINDOW | _UNTIED,
    "gpt_bigcode": {"num_key_value_heads": 1},
    "llama4_text": {
        "layer_types": "FULL",
        "no_rope_layers": "HALF",
        "moe_layers": [],
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attn_temperature_tuning": True,
        "floor_scale": "WINDOW",
        "attn_scale": 0.9,
    },
}

# Their rules of attention do not go through its function; emssd may serve them, or say why not.
MAY_BE_REFUSED = frozenset({"phimoe", "llama4_text", "gpt_oss"})


def draw_model(
    rng: random.Random,
    kind: str,
    *,
    vocab_size: int,
    max_model_len: int,
    dtype: torch.dtype = torch.float64,
    window: int | None = None,
) -> Any:
    """A random causal LM, eager, ready to evaluate; the global random state is left alone.

    Args:
        rng: of all that is random.
        kind: key of `KINDS` or `HYBRIDS`; the latter compute in float64 what they would compute in float32.
        vocab_size, max_model_len, dtype: as named.
        window: of its sliding layers; ``None`` draws one.
    """
    num_layers = rng.choice((1, 2, 2, 3))
    sizes = {"FULL": ["full_attention"] * num_layers, "HALF": [1, 0, 1][:num_layers]}
    sizes["WINDOW"] = window or rng.randint(2, 12)  # type: ignore[assignment]  # a number among lists
    values: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if kind in KINDS:
        values["n_layer" if kind == "gpt2" else "num_hidden_layers"] = num_layers
        values |= {name: sizes[value] if isinstance(value, str) else value for name, value in KINDS[kind].items()}
    std, seed = rng.choice((0.2, 0.3, 0.5)), rng.getrandbits(32)
    model: Any = tiny_model(
        kind, seed=seed, dtype=dtype, vocab_size=vocab_size, max_model_len=max_model_len, std=std, **values
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, too, or those that are forgotten would not show
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.set_attn_implementation("eager")
    if "num_experts_per_tok" in values:
        model.set_experts_implementation("eager")  # grouped products take no float64
    model.generation_config.eos_token_id = None
    if kind in HYBRIDS:
        model.forward = _in_float64(model.forward)
    return model


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with WideFloats():
            return forward(*args, **kwargs)

    return wide
