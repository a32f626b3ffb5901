"""Moves small tensors between host and device. The host waits only where it must."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

__all__ = ["Arriving", "on_device", "to_host", "together"]


def on_device(values: Seq[int] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """``[n]`` integers, moved to `device`. The way to a GPU is through pinned memory, so that the host does not wait.

    Args:
        values: host integers, or a tensor on the host.
        device: where to move them.
        dtype: of the result.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    elif device.type == "cuda" and values.device.type == "cpu":
        values = values.to(dtype).pin_memory()
    return values.to(device, dtype, non_blocking=True)


class Arriving(NamedTuple):
    """Integers on their way to the host: all work that its stream has now is done when they are there.

    Attributes:
        values: ``[n]`` pinned memory.
        device: from where they come.
    """

    values: torch.Tensor
    device: torch.device


def to_host(values: torch.Tensor | Arriving) -> list[int]:
    """``[n]`` integers as host integers. From a GPU this is one copy into pinned memory, and one wait for it."""
    if isinstance(values, Arriving):
        torch.cuda.current_stream(values.device).synchronize()
        return values.values.tolist()
    if values.device.type != "cuda":
        return values.tolist()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return pinned.tolist()


def together(tensors: Seq[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Flat int64 tensors of the host, moved to `device` in one copy. The results are views of one tensor."""
    if device.type == "cpu":
        return list(tensors)
    moved = on_device(torch.cat(list(tensors)), device)
    return list(torch.split_with_sizes(moved, [len(tensor) for tensor in tensors]))
