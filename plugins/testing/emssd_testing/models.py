"""Tiny random models of many architectures, in any precision: real code paths in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

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

_LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_HEADS = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")} | {"linear_num_key_heads": 2}
_MAMBA = {"mamba_d_state": 8, "use_mamba_kernels": False}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _GROUPED | _LAYERS | _HEADS | {"linear_num_value_heads": 4, "head_dim": 16},
    "kimi_linear": _COMMON
    | _LAYERS
    | {"mlp_layer_types": ["dense", "sparse", "dense"], "moe_intermediate_size": 16, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 8, "v_head_dim": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "hidden_size": 32}
    | {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "jamba": _GROUPED
    | _MAMBA
    | {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
    "lfm2": _GROUPED | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "zamba2": _COMMON
    | _MAMBA
    | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 8}
    | {"mamba_ngroups": 2, "chunk_size": 8, "use_mem_rope": True, "adapter_rank": 4, "num_mem_blocks": 1},
}
"""The same with layers that keep a state: one for each function of `emssd.model.hf.recurrent_layers`."""


class WideFloats(TorchFunctionMode):
    """Within, what a model computes in float32 whatever its dtype is computed in float64.

    Layers that keep a state do so, and many norms and softmax. Then logic alone is tested, and no rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(argument: Any) -> Any:
            return torch.float64 if argument is torch.float32 else argument

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(argument) for name, argument in (kwargs or {}).items()})


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
        architecture: a key of `ARCHITECTURES` or `HYBRIDS`, or any ``model_type`` that takes the values of Llama.
        seed: of the weights; the global random state is left alone.
        dtype: of the weights.
        vocab_size, max_model_len: as named; a vocabulary of a few tokens makes chance acceptance frequent.
        std: of the weights' normal distribution, wide enough for logits that clearly differ.
        overrides: further values of the architecture's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = (ARCHITECTURES | HYBRIDS).get(architecture, _GROUPED) | {"vocab_size": vocab_size}
    if architecture != "mamba2":  # which has no longest sequence
        values["max_position_embeddings"] = max_model_len
    config = AutoConfig.for_model(architecture, **(values | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]  # as below
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, std)
    if architecture in HYBRIDS:
        model.set_experts_implementation("eager")  # grouped products take no float64
    model.generation_config.eos_token_id = 2
    return model.eval()  # type: ignore[no-any-return]  # Transformers' loaders have no annotations
