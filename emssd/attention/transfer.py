"""Moves small tensors between host and device. The host waits only where it must."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch

__all__ = ["Staging", "on_device", "to_host", "together"]


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


def to_host(values: torch.Tensor) -> list[int]:
    """``[n]`` integers as host integers. From a GPU this is one copy into pinned memory, and one wait for it."""
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


class Staging:
    """Memory of a device that is filled anew in each step, in one copy from pinned memory of the host.

    There are two buffers on the host, which take turns. So a step is written while the one before is still read.

    Args:
        num_bytes: of the memory.
        device: of the memory.
        make_event: makes what tells whether the device has come so far, on a GPU ``torch.cuda.Event``.

    Attributes:
        memory: ``[num_bytes]`` uint8 on the device.
        buffers: two of ``[num_bytes]`` uint8 on the host.
    """

    def __init__(self, num_bytes: int, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        on_gpu = device.type == "cuda"
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        make_event = make_event or (torch.cuda.Event if on_gpu else None)
        self._read = [] if make_event is None else [make_event() for _ in self.buffers]
        self._turn = 0

    def next(self) -> int:
        """Which buffer to write: the other one. The host waits until nobody reads it any more."""
        self._turn = 1 - self._turn
        if self._read and not self._read[self._turn].query():
            self._read[self._turn].synchronize()
        return self._turn

    def move(self, num_bytes: int) -> None:
        """Copy the beginning of the buffer that is being written to the device."""
        self.memory[:num_bytes].copy_(self.buffers[self._turn][:num_bytes], non_blocking=True)

    def done(self) -> None:
        """What is launched from here on does not read the buffer that was written."""
        if self._read:
            self._read[self._turn].record()
