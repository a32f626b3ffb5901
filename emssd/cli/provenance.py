"""Provenance of a result: versions, machine and its best rates; and the words for a run.

The words are its plugins with their options, and every option that is not its default.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import timeit
from collections.abc import Callable
from enum import Enum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from emssd.cli.config import RunConfig
from emssd.decoding.engine import Engine
from emssd.hooks.registry import KINDS, Registry

__all__ = [
    "AROUND", "changed", "changed_of_run", "description", "hardware", "label_of", "machine_rates", "setting_of",
    "versions",
]  # fmt: skip

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # on which the speed of arithmetic depends
AROUND = frozenset({"resume", "overwrite", "output_dir", "progress", "figures", "details"})
"""Options that say where a run goes and how it is shown."""
_APART = {"drafter", "backend", "model", "data", "sampling", "budget", "speculate", "batch_size", "check", "data.name"}


def description(config: RunConfig, engine: Engine, registry: Registry) -> dict[str, Any]:
    """The part of the metrics that names a run, its software and its machine."""
    target, setting = engine.target, setting_of(config)
    machine = hardware(target.device)
    made_up = " (random weights)" if config.model.architecture else ""
    where = machine["device"] + (f", {target.group.size} processes" if target.group.size > 1 else "")
    dtype = str(target.dtype).removeprefix("torch.")
    used = sorted(registry.in_use.values(), key=lambda record: [*KINDS].index(record.kind))
    return {
        "title": f"{config.model.path}{made_up} · drafter={setting['drafter']} · backend={label_of(config.backend)} · "
        f"budget={setting['budget']} · batch {config.batch_size} · {dtype} on {where}",
        "setting": setting,
        "versions": versions(),
        "plugins": [{key: getattr(one, key) for key in ("kind", "name", "distribution", "version")} for one in used],
        "hardware": machine,
        "compiled": target.why_compiled,
        "batch_invariance": engine.runner.batch_invariance,
    }


def label_of(options: Any) -> str:
    """A plugin's name, and its options where they are not the defaults: ``padded(pad_kv=False)``."""
    values = [f"{name}={value}" for name, value in changed(options).items() if name != "name"]
    return f"{options.name}({', '.join(values)})" if values else str(options.name)


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not the defaults; those without a default are among them."""
    values = {}
    for field in dataclasses.fields(options):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        value = getattr(options, field.name)
        if value != default:
            values[field.name] = value.value if isinstance(value, Enum) else value
    return values


def changed_of_run(config: RunConfig) -> dict[str, Any]:
    """The same of a run, its model, its data and its sampling, under full names such as ``model.path``."""
    groups = {"": config, "model.": config.model, "data.": config.data, "sampling.": config.sampling}
    return {f"{group}{name}": value for group, part in groups.items() for name, value in changed(part).items()}


def setting_of(config: RunConfig) -> dict[str, Any]:
    """By which runs of the command line are compared: drafter, budget and batch size, and all that must be equal."""
    equal = {name: value for name, value in changed_of_run(config).items() if name not in AROUND | _APART}
    equal |= {"backend": label_of(config.backend), "data": config.data.name}
    return {
        "drafter": label_of(config.drafter) if config.speculate else "none",
        "budget": label_of(config.budget),
        "batch_size": config.batch_size,
        "options": sorted(f"{name}={value}" for name, value in equal.items()),
    }


def versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    return {name: version(name) for name in ("emssd", "torch", "transformers")} | {"python": platform.python_version()}


def hardware(device: torch.device) -> dict[str, Any]:
    """The processor, its cores and threads in use, and the device of the target."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def processor() -> str:
    """The processor's name, and those of its features on which the speed of arithmetic depends."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return platform.processor() or platform.machine()
    facts = dict(re.findall(r"^(.*?)[ \t]*:[ ]?(.*)$", file.read_text(), re.MULTILINE))
    features = [name for name in _CPU_FEATURES if name in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({', '.join(features)})"


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of reading memory, FLOPs per second of a large matrix product in `dtype`: the best of several.

    Measured once in a process for each number of threads; takes about a second on a CPU, and 2 GiB of memory on a GPU.
    """
    return _measured_rates(device, dtype, torch.get_num_threads())


@cache
def _measured_rates(device: torch.device, dtype: torch.dtype, _threads: int) -> tuple[float, float]:
    on_gpu = device.type == "cuda"
    large = torch.ones(1 << (28 if on_gpu else 26), dtype=torch.float32, device=device)
    bandwidth = large.numel() * large.element_size() / _best_seconds(large.sum, 10, device)
    width = 8192 if on_gpu else 1024
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return bandwidth, 2 * width**3 / _best_seconds(lambda: a @ b, 20, device)


def _best_seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    def whole() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    whole()
    return min(timeit.repeat(whole, number=1, repeat=times))
