"""Tiny random models of many architectures, in any precision: real code paths in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ARCHITECTURES", "tiny_model"]

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2, "head_dim": 8}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "opt": _COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "llama": _GROUPED,
    "qwen2": _GROUPED | {"use_sliding_window": False},
    "qwen3": _GROUPED,
    "mistral": _GROUPED | {"sliding_window": 7},
    "gemma2": _GROUPED
    | {"sliding_window": 7, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "gpt_neox": _COMMON,
    "phi": _COMMON,
}
"""Config values of the architectures that emssd is tested with, by Transformers' ``model_type``."""


def tiny_model(
    architecture: str = "opt",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    vocab_size: int = 61,
    max_model_len: int = 128,
    std: float = 0.3,
    **overrides: Any,
) -> PreTrainedModel:
    """A random causal LM.

    Args:
        architecture: a key of `ARCHITECTURES`.
        seed: of the weights; the global random state is left alone.
        dtype: of the weights.
        vocab_size, max_model_len: as named; a vocabulary of a few tokens makes chance acceptance frequent.
        std: of the weights' normal distribution, wide enough for logits that clearly differ.
        overrides: further values of the architecture's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = ARCHITECTURES[architecture] | {"vocab_size": vocab_size, "max_position_embeddings": max_model_len}
    config = AutoConfig.for_model(architecture, **(values | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]  # as below
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, std)
    model.generation_config.eos_token_id = 2
    return model.eval()  # type: ignore[no-any-return]  # Transformers' loaders have no annotations
