"""Provenance of a result: command, commit, versions, machine, and the best rates of that machine."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from emssd.hooks.registry import KINDS, Registry

__all__ = ["commit", "hardware", "machine_rates", "plugins", "processor", "provenance", "versions"]

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # on which the speed of arithmetic depends


def provenance(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Command, commit, date, versions and hardware of this process, for a result that is kept."""
    rates = dict(zip(("bytes_per_second", "flops_per_second"), machine_rates(device, dtype), strict=True))
    return {
        "command": _command(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "hardware": hardware(device) | rates,
    }


def versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    from importlib.metadata import version

    import transformers

    return {
        "emssd": version("emssd"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def plugins(registry: Registry) -> list[dict[str, str]]:
    """Kind, name, distribution and version of all that a run was built of, drafters that others combine included."""
    used = sorted(registry.in_use.values(), key=lambda record: [*KINDS].index(record.kind))
    return [{name: getattr(record, name) for name in ("kind", "name", "distribution", "version")} for record in used]


def hardware(device: torch.device) -> dict[str, Any]:
    """The processor, its cores and threads in use, and the device of the target."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


@cache
def commit() -> str | None:
    """The checkout that this code runs from, ``-dirty`` if it was changed; ``None`` for an installed wheel."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or not a repository that it trusts
        return None
    return said.stdout.strip()


def processor() -> str:
    """The processor's name, and those of its features on which the speed of arithmetic depends."""
    known = Path("/proc/cpuinfo")
    if not known.is_file():
        return platform.processor() or platform.machine()
    lines = dict(line.partition(":")[::2] for line in known.read_text().splitlines() if ":" in line)
    said = {name.strip(): value for name, value in lines.items()}
    wanted = [name for name in _CPU_FEATURES if name in said.get("flags", "").split()]
    return f"{said.get('model name', platform.machine()).strip()} ({', '.join(wanted)})"


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of reading memory, FLOPs per second of a large matrix product in `dtype`: the best of several.

    Measured once in a process for each number of threads; takes about a second on a CPU, and 2 GiB of memory on a GPU.
    """
    return _measured_rates(device, dtype, torch.get_num_threads())


@cache
def _measured_rates(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, float]:
    """The same; `threads` only says for how many it was measured."""
    on_gpu = device.type == "cuda"
    large = torch.ones(1 << (28 if on_gpu else 26), dtype=torch.float32, device=device)
    bandwidth = large.numel() * large.element_size() / _best_seconds(large.sum, 10, device)
    width = 8192 if on_gpu else 1024
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return bandwidth, 2 * width**3 / _best_seconds(lambda: a @ b, 20, device)


def _best_seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(times))


def _command() -> str:
    import shlex

    program = Path(sys.argv[0])
    name = "python -m emssd" if program.name in ("__main__.py", "emssd") else f"python {program.name}"
    return " ".join([name, *map(shlex.quote, sys.argv[1:])])
