"""The models that can be served at all, their lengths and shards, as their config tells; `probe` tells the rest."""

from __future__ import annotations

import sys
from typing import Any, cast

from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model.hf.devices import check_offloaded, is_spread
from emssd.model.hf.mixing import keeps_states

__all__ = [
    "check_config",
    "check_heads",
    "check_whole",
    "count_heads",
    "length_limit",
    "resolve_max_model_len",
    "shards_of",
]

_POSSIBLE = "decode it with its own generate, or take a type of docs/reference/models.md"
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "chunked_attention"}
_OPT = {
    "model.decoder.layers.*.self_attn.q_proj": "colwise",
    "model.decoder.layers.*.self_attn.k_proj": "colwise",
    "model.decoder.layers.*.self_attn.v_proj": "colwise",
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
    "model.decoder.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
"""For ``opt``, which Transformers has no plan for: by module, with ``*`` for a layer, one of its parallel styles."""


def length_limit(config: Any) -> int | None:
    """The longest sequence by a model's config; ``None`` if it names none."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit is not None and limit > 0 else None


def resolve_max_model_len(config: Any, max_model_len: int | None) -> int:
    """The longest sequence to allow; refused where the model computes positions otherwise in longer ones."""
    text, limit = config.get_text_config(), length_limit(config)
    if max_model_len is None:
        if limit is None:
            raise ConfigError(f"{config.model_type} has no length limit in its config; set model.max_model_len")
        max_model_len = limit
    elif max_model_len < 2 or (limit is not None and max_model_len > limit):
        raise ConfigError(f"max_model_len is {max_model_len}; this model takes 2 to {limit or 'any number of'} tokens")
    _check_rotary(text, config.model_type, max_model_len)
    _check_chunks(text, config.model_type, max_model_len)
    return max_model_len


def check_config(config: Any, model_class: type | None) -> None:
    """Refuse, before any weights are loaded, what the config shows cannot be served at any length."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type
    if config.is_encoder_decoder:
        raise _refused(name, "it is an encoder-decoder model, and emssd decodes decoder-only language models")
    text = config.get_text_config()
    if model_class is None:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _refused(name, "Transformers has no causal language model for it")
        model_class = cast("type", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if getattr(text, "alibi", False) or name in {"bloom", "mpt"}:
        raise _refused(name, f"it encodes positions with ALiBi biases, which reach no attention function; {_POSSIBLE}")
    if keeps_states(model_class):  # the probe tells whether nothing else mixes tokens
        return
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    foreign = sorted(set(layer_types) - _SERVED_LAYER_TYPES)
    if foreign:
        raise _refused(
            name,
            f"it has layers of type {', '.join(foreign)}, and emssd does not know how their code keeps what it read; "
            f"{_POSSIBLE}",
        )
    if hasattr(model_class, "get_base_model"):
        raise _refused(name, "it is wrapped by PEFT; give its get_base_model(), which computes with the adapters")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refused(
            name,
            "its code does not use Transformers' attention interface (recurrent and older architectures), so its "
            f"KV cache cannot be managed from outside; {_POSSIBLE}",
        )


def check_whole(model: Any) -> None:
    """Refuse a loaded model that is not whole, compiled, or on several devices without Accelerate's hooks."""
    for module in (part for part in model.modules() if hasattr(part, "base_model_prefix")):  # itself, and its base
        forward = vars(module).get("forward")
        if module._compiled_call_impl is not None or hasattr(forward, "get_compiler_config"):
            raise _refused(
                model.config.model_type,
                f"{type(module).__name__} is compiled by torch.compile, which hides its attention; give the model as "
                "it was loaded",
            )
    distributed = sys.modules.get("torch.distributed.tensor")  # if nobody has imported it, there are no such tensors
    if distributed and any(isinstance(weight, distributed.DTensor) for weight in model.parameters()):
        raise _refused(
            model.config.model_type,
            "it is a shard of a model that is spread over several processes; let emssd load it, with "
            "Engine.from_pretrained(path, tensor_parallel=True)",
        )
    if is_spread(model):
        check_offloaded(model)
        return
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise _refused(
            model.config.model_type,
            f"its layers are on several devices ({', '.join(devices)}), and nothing moves what they compute from one "
            f"to the next; load it with device_map",
        )


def _check_rotary(text: Any, name: str, max_model_len: int) -> None:
    """Refuse rotary frequencies that change with the longest sequence of the batch.

    Those of type ``dynamic`` change only beyond ``max_position_embeddings``, where no sequence gets.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    # Models whose layers differ have one set of parameters for each type of layer.
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original = values.get("original_max_position_embeddings") or 0
        if values.get("rope_type") == "longrope" and max_model_len > original:
            raise _refused(
                name,
                "its longrope rotary frequencies depend on the longest sequence of the batch; "
                + (f"model.max_model_len={original} or less works" if original else "no length avoids that"),
            )


def _check_chunks(text: Any, name: str, max_model_len: int) -> None:
    """Refuse layers that attend in chunks, where a sequence can be longer than one; within one they see everything."""
    chunk = getattr(text, "attention_chunk_size", None) or 0
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()) and max_model_len > chunk:
        raise _refused(
            name,
            f"it has layers of type chunked_attention; model.max_model_len={chunk} or less works, where a sequence is "
            "one chunk",
        )


def shards_of(config: Any, size: int) -> Any:
    """The ``distributed_config`` for `from_pretrained` by which a model is sharded over `size` processes, those of the
    process group. Raises UnsupportedModelError: it cannot be.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    text, name = config.get_text_config(), config.model_type
    if name != "opt" and not (config.base_model_tp_plan or text.base_model_tp_plan):
        raise UnsupportedModelError(
            f"{name} cannot be spread over {size} processes: Transformers has no tensor parallel plan for it. Leave "
            f"model.tensor_parallel out, and run it on one device"
        )
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if num_heads % size or num_kv_heads % size:
        possible = [n for n in range(2, num_kv_heads + 1) if num_heads % n == 0 and num_kv_heads % n == 0]
        what = f"take {' or '.join(map(str, possible))} processes" if possible else "run it on one device"
        raise UnsupportedModelError(
            f"{name} cannot be spread over {size} processes: it has {num_heads} query heads and {num_kv_heads} key "
            f"heads, and each process has to get equally many; {what}"
        )
    return DistributedConfig(tp_plan=dict(_OPT) if name == "opt" else "auto")


def count_heads(model: Any, size: int) -> None:
    """Let the attention of ``opt`` count the heads of this process, where it counts those of its config."""
    if model.config.model_type == "opt":
        for layer in model.model.decoder.layers:
            layer.self_attn.num_heads //= size


def check_heads(target: Any, size: int) -> None:
    """Refuse a model whose attention, as it ran, has neither all heads in each process nor its part of them."""
    text = target.model.config.get_text_config()
    whole = text.num_attention_heads
    for index, layer in enumerate(target.layers):
        if layer.num_qo_heads not in (whole, whole // size):
            raise UnsupportedModelError(
                f"{type(target.model).__name__} cannot be spread over {size} processes: layer {index} runs "
                f"{layer.num_qo_heads} of {whole} query heads in each"
            )


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} cannot be served: {reason}")
