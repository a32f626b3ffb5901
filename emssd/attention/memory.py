"""The memory that the KV cache may take."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from emssd.errors import ConfigError

__all__ = ["free_bytes", "kv_bytes"]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def kv_bytes(kv_memory: str | float | None, device: torch.device, free: Callable[[], int] | None = None) -> int | None:
    """Bytes that `kv_memory` means: ``8GiB``, ``500MB``, a number of bytes, or a share of the free memory (``0.8``).

    The free memory is that of `device`, or what `free` says.
    """
    if kv_memory is None:
        return None
    match = re.fullmatch(r"([0-9.]+(?:e[+]?[0-9]+)?)\s*([KMGT]?i?B?)", str(kv_memory).strip())
    try:
        number, unit = float(match[1]), match[2]  # type: ignore[index]  # no match is caught below
        num_bytes = int(number * _UNITS[unit])
    except (TypeError, ValueError, KeyError, OverflowError):
        number, unit, num_bytes = 0.0, "", 0
    if number <= 0 or (unit and num_bytes < 1):
        raise ConfigError(
            f"kv_memory is {kv_memory!r}; give a size such as 8GiB or 500MB, or a share of the free memory such as 0.8"
        )
    if number <= 1 and not unit:
        return int(number * (free_bytes(device) if free is None else free()))
    return num_bytes


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device`, with the freed memory that PyTorch keeps."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    available: int = psutil.virtual_memory().available
    return available
