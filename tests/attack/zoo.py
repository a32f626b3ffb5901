"""Tiny models with random weights, of every kind of attention that a config can ask for."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from emssd_testing.models import HYBRIDS, WideFloats

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
_ONE_HEAD_EACH: dict[str, Any] = {
    name: value for name, value in _SIZES.items() if name not in ("num_key_value_heads", "head_dim")
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# By Transformers' model_type; WINDOW, LAYERS and so on are filled in by `draw_model`.
KINDS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": _SIZES | {"sliding_window": "WINDOW"},
    "ministral": _SIZES | {"sliding_window": "WINDOW"},
    "mixtral": _SIZES | _EXPERTS | {"sliding_window": "WINDOW", "num_local_experts": 4},
    "qwen2": _SIZES | {"sliding_window": "WINDOW", "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _SIZES,
    "qwen3_moe": _SIZES | _EXPERTS | {"num_experts": 4},
    "gemma": _SIZES | {"tie_word_embeddings": False},
    "gemma2": _SIZES
    | {
        "sliding_window": "WINDOW",
        "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": False,
    },
    "gemma3_text": _SIZES
    | {
        "sliding_window": "WINDOW",
        "query_pre_attn_scalar": 8,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
    },
    "opt": _ONE_HEAD_EACH | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": _GPT,
    "gpt_neox": _ONE_HEAD_EACH,
    "gpt_bigcode": _GPT,
    "phi": _ONE_HEAD_EACH,
    "phi3": _SIZES | {"sliding_window": "WINDOW"},
    "phimoe": _SIZES | _EXPERTS | {"sliding_window": "WINDOW", "num_local_experts": 4},
    "llama4_text": _SIZES
    | {
        "layer_types": "FULL",
        "no_rope_layers": "HALF",
        "moe_layers": [],
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attn_temperature_tuning": True,
        "floor_scale": "WINDOW",
        "attn_scale": 0.9,
    },
    "cohere": _SIZES | {"tie_word_embeddings": False},
    "cohere2": _SIZES | {"sliding_window": "WINDOW", "tie_word_embeddings": False},
    "olmo2": _SIZES,
    "olmo3": _SIZES | {"sliding_window": "WINDOW"},
    "starcoder2": _SIZES | {"sliding_window": "WINDOW"},
    "granite": _SIZES,
    "exaone4": _SIZES | {"sliding_window": "WINDOW"},
    "gpt_oss": _SIZES | _EXPERTS | {"sliding_window": "WINDOW", "num_local_experts": 4},
    "vaultgemma": _SIZES | {"sliding_window": "WINDOW", "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
}

# Those that have rules of attention which do not go through its function; emssd may serve them, or say why not.
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
    """A random causal LM of a `KINDS`, eager, ready to evaluate; the global random state is left alone.

    Args:
        rng: of all that is random.
        kind: key of `KINDS` or `HYBRIDS`; the latter compute in float64 what they would compute in float32.
        vocab_size, max_model_len, dtype: as named.
        window: of its sliding layers; ``None`` draws one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    num_layers = rng.choice((1, 2, 2, 3))
    drawn = {
        "WINDOW": window or rng.randint(2, 12),
        "FULL": ["full_attention"] * num_layers,
        "HALF": [1, 0, 1][:num_layers],
    }
    given = KINDS[kind] if kind in KINDS else HYBRIDS[kind] | {"bos_token_id": None, "eos_token_id": None}
    values = {name: drawn.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
    if kind in KINDS:
        values["n_layer" if "n_embd" in values else "num_hidden_layers"] = num_layers
    values["vocab_size"] = vocab_size
    values["n_positions" if "n_embd" in values else "max_position_embeddings"] = max_model_len
    with torch.random.fork_rng():
        torch.manual_seed(rng.getrandbits(32))
        config = AutoConfig.for_model(kind, **values)
        config._experts_implementation = "eager"  # the others have no float64
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        spread = rng.choice((0.2, 0.3, 0.5))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, spread)
                else:  # norms and biases, too, or those that are forgotten would not show
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    if kind in HYBRIDS:
        model.forward = _in_float64(model.forward)
    return model.eval()


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with WideFloats():
            return forward(*args, **kwargs)

    return wide
