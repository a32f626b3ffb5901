"""Tiny configs of every causal LM that Transformers has: few and narrow layers, short windows, early thresholds.

Sizes are found by their names in the configs; lists with an entry for each layer keep the first layer of every kind.
"""

from __future__ import annotations

from typing import Any

__all__ = ["VARIANTS", "VOCAB_SIZE", "build_config", "causal_lm_types", "variants"]

VOCAB_SIZE, MAX_MODEL_LEN, NUM_LAYERS = 61, 128, 2

_SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "text_vocab_size"], VOCAB_SIZE),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"],
                    MAX_MODEL_LEN),
    **dict.fromkeys(["max_target_positions", "max_source_positions", "context_length"], MAX_MODEL_LEN),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "emb_dim",
                     "attention_hidden_size", "input_embedding_size", "output_embedding_size",
                     "cross_attention_hidden_size"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim",
                     "intermediate_size_mlp", "dff", "dim_ff", "dense_intermediate_size", "shared_intermediate_size",
                     "shared_expert_intermediate_size", "shared_experts_intermediate_size"], 48),
    **dict.fromkeys(["moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size",
                     "prefix_dense_intermediate_size"], 24),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
                     "swa_num_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads",
                     "num_global_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "attention_head_size", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
                     "swa_head_dim", "kv_channels", "index_head_dim", "rotary_dim", "dim_head", "attention_head_dim",
                     "global_head_dim", "swa_v_head_dim"], 8),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank", "qk_head_dim", "hc_lowrank", "gated_norm_rank",
                     "laurel_rank", "hidden_size_per_layer_input", "mamba_chunk_size", "chunk_size",
                     "linear_key_head_dim", "linear_value_head_dim",
                     "linear_head_dim"], 16),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts", "n_group",
                     "num_expert_group", "index_n_heads"], 2),
    **dict.fromkeys(["topk_group", "moe_layer_start_index", "first_k_dense_replace", "num_dense_layers",
                     "mamba_n_groups", "n_shared_experts", "n_groups"], 1),
    **dict.fromkeys(["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim"], 8),
    # Windows, chunks and thresholds: all are passed within the texts of the sweep.
    **dict.fromkeys(["sliding_window", "sliding_window_size", "attention_window_size", "local_attention", "window_size",
                     "local_attention_window_len"], 7),
    **dict.fromkeys(["keep_window_size", "rel_extent"], 12),
    **dict.fromkeys(["attention_chunk_size"], 8),
    **dict.fromkeys(["floor_scale", "log_scaling_n_floor"], 5),
    **dict.fromkeys(["index_topk"], 6),
    **dict.fromkeys(["dim_model_base", "query_pre_attn_scalar"], 8),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
                     "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack"], NUM_LAYERS),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"], 2),
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "is_decoder": True, "add_cross_attention": False,
    "num_nextn_predict_layers": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": False,
}  # fmt: skip
"""Values of config fields, by their name; those that a config does not have, or that are lists there, are left out."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

_SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2, "head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.5}},
    "falcon_h1": {"hidden_size": 32, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "mamba2": {"hidden_size": 32, "num_heads": 8, "head_dim": 8},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron": {"num_key_value_heads": 2},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_headdim": 8,
        "adapter_rank": 4,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
    "opt": {"word_embed_proj_dim": 16},
}
"""Values that only one model type needs, such as the layers of its published models that its default config has not."""

_ROPE: dict[str, Any] = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
_BY_HAND: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v2": {"no query rank": {"q_lora_rank": None}, "groups": {"topk_method": "group_limited_greedy",
                    "n_group": 2, "topk_group": 1}},
    "deepseek_v3": {"no query rank": {"q_lora_rank": None, "rope_interleave": False}},
    "gemma3n_text": {"shared": {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"] * 2}},
    "gemma4_text": {"shared": {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
                    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                                "moe_intermediate_size": 24}},
    "llama": {"llama3": {"rope_parameters": _ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0}},
              "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
              "one head": {"num_key_value_heads": 1, "pretraining_tp": 1}},
    "llama4_text": {"full": {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "moe_layers": [1]},
                    "early": {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "moe_layers": [1],
                              "floor_scale": 200},
                    "untuned": {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "moe_layers": [1],
                                "attn_temperature_tuning": False},
                    "one chunk": {"attention_chunk_size": 128, "floor_scale": 200}},
    "mistral": {"full": {"sliding_window": None}},
    "opt": {"after": {"do_layer_norm_before": False}, "one": {"word_embed_proj_dim": 32}},
    "phi3": {"longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4,
                          "long_factor": [3.0] * 4, "original_max_position_embeddings": 48},
                          "original_max_position_embeddings": 48},
             "partly": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
    "qwen2_moe": {"dense": {"mlp_only_layers": [0], "decoder_sparse_step": 1}},
    "qwen3_moe": {"dense": {"mlp_only_layers": [0], "decoder_sparse_step": 1}},
    "ministral3": {"scaled": {"rope_parameters": _ROPE | {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0,
                   "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0}}},
}  # fmt: skip
"""Further variants of some types: what their configs can switch on."""

_FEATURES: dict[str, Any] = {
    "use_sliding_window": True, "max_window_layers": 1, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0,
    "logit_softcapping": 4.0, "attention_bias": True, "mlp_bias": True, "use_bias": True, "qk_layernorm": True,
    "use_qk_norm": True, "attn_temperature_tuning": True, "clip_qkv": 1.5, "logits_scaling": 1.7,
    "residual_multiplier": 0.8, "embedding_multiplier": 1.3, "attention_multiplier": 0.4, "logit_scale": 0.3,
    "norm_topk_prob": True, "mup_enabled": True, "scale_attn_by_inverse_layer_idx": True,
    "new_decoder_architecture": True, "use_parallel_residual": False,
    "attention_k_eq_v": True, "is_moe": True, "enable_moe_block": True, "lm_head_bias": True,
    "attention_out_bias": True, "routed_scaling_factor": 1.5, "use_post_norm": True, "use_qkv_bias": True,
    "add_qk_norm": True, "use_double_wide_mlp": True, "tie_word_embeddings": True,
}  # fmt: skip
"""The options that the variant ``features`` switches on, where a config has a field of that name."""

VARIANTS = ("default", "features", "windows", "full", "yarn")
"""``default``: as its config class has it, but small. ``windows``: full and sliding layers in turn, or a window.
``full``: full attention in place of every layer that is neither. ``yarn``: such rotary frequencies, from early on."""


def causal_lm_types() -> list[str]:
    """Every model type that has a causal LM in the installed Transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def variants(model_type: str) -> list[str]:
    """The names of all variants of a type, some of which may make no difference to it."""
    return list(dict.fromkeys([*VARIANTS, *_BY_HAND.get(model_type, {})]))


def build_config(model_type: str, variant: str = "default") -> Any:
    """A tiny config, or ``None`` where the variant makes no difference to this type.

    Raises:
        Exception: whatever Transformers raises about values that do not fit together.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type, **_SPECIAL.get(model_type, {}))
    values = _merged(_shrunk(default), _SPECIAL.get(model_type, {}))
    if variant != "default":
        changes = _BY_HAND.get(model_type, {}).get(variant) or _changes(default, values, variant)
        if not changes:
            return None
        values = _merged(values, changes)
    return AutoConfig.for_model(model_type, **values)


def _shrunk(config: Any) -> dict[str, Any]:
    defaults = config.to_dict()
    values = {name: value for name, value in _SIZES.items() if isinstance(defaults.get(name), int | float)}
    values |= {name: value for name, value in (("eos_token_id", None), ("head_dim", 8)) if name in defaults}
    if defaults.get("num_key_value_heads") == defaults.get("num_attention_heads") is not None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    count = next((defaults[name] for name in _LAYERS if isinstance(defaults.get(name), int)), None)
    values |= _fewer_layers(defaults, count) if count else {}
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        if hasattr(sub, "to_dict"):
            values[name] = _shrunk(sub) | ({"model_type": sub.model_type} if sub.model_type else {})
    return values


def _fewer_layers(defaults: dict[str, Any], count: int) -> dict[str, Any]:
    """Lists of `count` entries, cut to the first layer of each kind."""
    lists = {
        name: value for name, value in defaults.items()
        if isinstance(value, list | tuple) and len(value) == count and count > 2 and name != "moe_layers"
    }  # fmt: skip
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(str([value[layer] for value in lists.values()]), layer)
    firsts = list(kinds.values())[:6]
    others = [layer for layer in range(count) if layer not in firsts]
    kept = sorted(firsts + others[: max(NUM_LAYERS - len(firsts), 0)])
    shorter: dict[str, Any] = {name: [value[layer] for layer in kept] for name, value in lists.items()}
    if "moe_layers" in defaults and isinstance(defaults["moe_layers"], list):
        shorter["moe_layers"] = [new for new, old in enumerate(kept) if old in defaults["moe_layers"]]
    return shorter | {name: len(kept) for name in _LAYERS if isinstance(defaults.get(name), int)}


def _changes(default: Any, values: dict[str, Any], variant: str) -> dict[str, Any]:
    """The fields that a variant changes, in the text part of the config."""
    defaults = default.to_dict()
    if isinstance(values.get("text_config"), dict):
        inner = _changes(default.text_config, values["text_config"], variant)
        return {"text_config": inner} if inner else {}
    types = values.get("layer_types")
    if variant == "features":
        return {name: value for name, value in _FEATURES.items() if name in defaults and defaults[name] != value}
    if variant == "windows":
        changes = {
            name: value for name, value in (("sliding_window", 6), ("use_sliding_window", True)) if name in defaults
        }
        if types and "sliding_window" in defaults:
            changes["layer_types"] = [("full_attention", "sliding_attention")[i % 2] for i in range(len(types))]
        return changes
    if variant == "full":
        foreign = set(types or ()) - {"full_attention", "sliding_attention"}
        return {"layer_types": ["full_attention"] * len(types)} if foreign else {}
    if variant != "yarn" or "rope_parameters" not in defaults:
        return {}
    rope, scaled = defaults["rope_parameters"] or {}, _ROPE | {"rope_type": "yarn", "factor": 4.0}
    if rope and all(isinstance(value, dict) for value in rope.values()):
        plain = {name for name, value in rope.items() if value.get("rope_type") == "default"}
        return {"rope_parameters": {name: value | (scaled if name in plain else {}) for name, value in rope.items()}}
    return {"rope_parameters": rope | scaled if rope.get("rope_type") == "yarn" else scaled}


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        before = merged.get(name)
        merged[name] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
