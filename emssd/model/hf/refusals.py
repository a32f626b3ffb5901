"""Refuses models by their config and their modules, and lengths beyond it; `emssd.model.hf.probe` finds the rest."""

from __future__ import annotations

import sys
from typing import Any, cast

from emssd.data.model_folder import cannot_load
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.errors.faults import described
from emssd.model.hf.device_map import check_offloaded, is_spread
from emssd.model.hf.recurrent_layers import keeps_states

__all__ = ["check_config", "check_quantized", "check_whole", "length_limit", "resolve_max_model_len"]

_POSSIBLE = "decode it with its own generate, or take a type of docs/reference/models.md"
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "chunked_attention"}


def length_limit(config: Any) -> int | None:
    """The longest sequence by a model's config; ``None`` if it names none."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit is not None and limit > 0 else None


def resolve_max_model_len(config: Any, max_model_len: int | None) -> int:
    """The longest sequence to allow. Raises UnsupportedModelError: longer ones have other positions."""
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
    """Refuse a model that cannot be served at any length, by its config alone, before weights are loaded."""
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


def check_quantized(path: str, config: Any, device_map: Any) -> None:
    """Refuse weights in a format that needs another package or device, before any are read."""
    from transformers.quantizers.auto import AutoHfQuantizer

    parts = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    if (values := next(filter(None, parts), None)) is None:
        return
    try:
        quantizer = AutoHfQuantizer.from_config(values.copy(), pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except Exception as error:  # each format has its own code, and values that anybody may have written
        raise cannot_load(
            path,
            f"its weights are quantised in the format {values.get('quant_method')}, which cannot be used here "
            f"({described(error).rstrip('.')}); give a dense folder of the model, or a .gguf file",
        ) from error


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
    """Refuse rotary frequencies that change with the longest sequence of the batch, up to `max_model_len`."""
    rope = getattr(text, "rope_parameters", None) or {}
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # or one for each layer type
        original = values.get("original_max_position_embeddings") or 0
        if values.get("rope_type") == "longrope" and max_model_len > original:
            raise _refused(
                name,
                "its longrope rotary frequencies depend on the longest sequence of the batch; "
                + (f"model.max_model_len={original} or less works" if original else "no length avoids that"),
            )


def _check_chunks(text: Any, name: str, max_model_len: int) -> None:
    """Refuse layers that attend in chunks, if a sequence can be longer than one."""
    chunk = getattr(text, "attention_chunk_size", None) or 0
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()) and max_model_len > chunk:
        raise _refused(
            name,
            f"it has layers of type chunked_attention; model.max_model_len={chunk} or less works, where a sequence is "
            "one chunk",
        )


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} cannot be served: {reason}")
