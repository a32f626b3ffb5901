"""Models on several devices: maps for Accelerate and the device of the logits; plans of tensor parallelism."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from emssd.errors import ConfigError, UnsupportedModelError

__all__ = [
    "check_device_map", "check_heads", "check_offloaded", "count_heads", "is_spread", "output_device", "shards_of",
]  # fmt: skip

DeviceMap = str | Mapping[str, int | str]
"""Where the modules of a model go, as Transformers takes it: by name, or as Accelerate chooses."""

_CHOICES = ("auto", "balanced", "balanced_low_0", "sequential")
_NOWHERE = ("disk", "meta")

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
"""A plan for ``opt``, as Transformers has none: by module, with ``*`` for a layer, one of its parallel styles."""


def check_device_map(device_map: DeviceMap) -> None:
    """Raises ConfigError: the map cannot be. No weights are read."""
    if isinstance(device_map, str):
        if device_map not in _CHOICES:
            raise ConfigError(
                f"model.device_map is {device_map!r}; choose {', '.join(_CHOICES)}, or give a device for each module, "
                f"as in {{model.embed_tokens: 0, model.layers.0: cpu, …}}; model.device puts all on one device"
            )
    elif not isinstance(device_map, Mapping) or not device_map:
        raise ConfigError(f"model.device_map is {device_map!r}; it must be a word or a map from modules to devices")
    else:
        for module, name in device_map.items():
            _check_device(str(module), name)
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("model.device_map needs the package accelerate: pip install 'emssd[devices]'")


def _check_device(module: str, name: Any) -> None:
    if name in _NOWHERE:
        why = f"{name}, and emssd computes with weights that are in memory; choose a GPU's number or cpu"
    elif type(name) not in (int, str) or (type(name) is int and not 0 <= name < torch.cuda.device_count()):
        why = f"{name!r}, and this machine has {torch.cuda.device_count()} GPUs; give a GPU's number or cpu"
    else:
        try:
            torch.empty(0, device=name)
            return
        except (RuntimeError, AssertionError):
            why = f"{name!r}, which cannot be used here; give a GPU's number or cpu"
    raise ConfigError(f"model.device_map puts {module!r} on {why}")


def is_spread(model: Any) -> bool:
    """Whether Accelerate's hooks move what the model computes from device to device."""
    return hasattr(model, "_hf_hook")


def check_offloaded(model: Any) -> None:
    """Raises UnsupportedModelError: Accelerate keeps a part of the model on disk."""
    on_disk = [name for name, device in (getattr(model, "hf_device_map", None) or {}).items() if device == "disk"]
    if on_disk:
        raise UnsupportedModelError(
            f"{model.config.model_type} cannot be served: there is no memory for all of its weights, and Accelerate "
            f"put {on_disk[0]!r} and {len(on_disk) - 1} more modules on disk; take a smaller model or dtype"
        )


def output_device(model: Any) -> torch.device:
    """The device on which the logits come out, and tokens are chosen.

    Weights that lie in the host's memory beside a GPU are copied there when they are used: their device is the GPU.
    """
    device: Any = model.device
    if is_spread(model):
        head = model.get_output_embeddings()
        if head is not None and not head.weight.is_meta:
            device = head.weight.device
        else:
            chains = [hook for module in (head, model) if (hook := getattr(module, "_hf_hook", None)) is not None]
            hooks = [hook for chain in chains for hook in getattr(chain, "hooks", [chain])]  # one, or several in a row
            devices = (getattr(hook, "execution_device", None) for hook in hooks)
            device = next((device for device in devices if device is not None), "cpu")
    return torch.empty(0, device=device).device


def shards_of(config: Any, size: int) -> Any:
    """The ``distributed_config`` for `from_pretrained` in `size` processes, or UnsupportedModelError: there is none."""
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
    """Refuse a model whose attention ran neither all heads in each process nor its part of them."""
    text = target.model.config.get_text_config()
    whole = text.num_attention_heads
    for index, layer in enumerate(target.layers):
        if layer.num_qo_heads not in (whole, whole // size):
            raise UnsupportedModelError(
                f"{type(target.model).__name__} cannot be spread over {size} processes: layer {index} runs "
                f"{layer.num_qo_heads} of {whole} query heads in each"
            )
