"""Models whose layers Accelerate has put on several devices: maps that can be, and the device of the logits."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from emssd.errors import ConfigError, UnsupportedModelError

__all__ = ["check_device_map", "check_offloaded", "is_spread", "output_device"]

DeviceMap = str | Mapping[str, int | str]
"""Where the modules of a model go, as Transformers takes it: by name, or as Accelerate chooses."""

_CHOICES = ("auto", "balanced", "balanced_low_0", "sequential")
_NOWHERE = ("disk", "meta")


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
