"""Steps of a few fixed sizes. Their forward passes can be recorded once and replayed, for example as CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch

from emssd.attention.packed import PackedInputs
from emssd.attention.transfer import on_device

__all__ = ["Capture", "Compute", "StaticInputs", "ladder", "rung"]

Compute = Callable[[], torch.Tensor]


def ladder(max_tokens: int) -> tuple[int, ...]:
    """Token counts to record: all up to 8, then four in each doubling. So padding stays below a quarter."""
    sizes = list(range(1, 9))
    step = 2
    while sizes[-1] < max_tokens:
        last = sizes[-1]
        sizes.extend(last + step * i for i in range(1, 5))
        step *= 2
    return tuple(size for size in sizes if size <= max_tokens)


def rung(sizes: tuple[int, ...], num_tokens: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_tokens`; ``None`` if none does."""
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else None


class StaticInputs:
    """The tensors that recorded passes read. Each step fills them anew; their addresses never change.

    Args:
        max_tokens: of the largest step.
        device: of the tensors.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.position_ids = torch.zeros_like(self.input_ids)
        self.slots = torch.zeros_like(self.input_ids)
        self.logit_rows = torch.zeros_like(self.input_ids)
        self.counting = torch.arange(max_tokens, device=device)

    def fill(self, packed: PackedInputs, slots: torch.Tensor, scrap_slots: torch.Tensor) -> None:
        """Write one step. A padding token is token 0 at position 0, and nobody reads the slot that its KV goes to.

        Args:
            packed: the step.
            slots: ``[nnz]`` int64 on the host.
            scrap_slots: ``[padding]`` int64 on the host, one for each padding token.
        """
        size, device = packed.num_tokens + len(scrap_slots), self.slots.device
        buffers = (self.input_ids, self.position_ids, self.logit_rows)
        for buffer, real in zip(buffers, packed.on(device), strict=True):
            buffer[: len(real)].copy_(real, non_blocking=True)
            buffer[len(real) : size].zero_()
        self.slots[:size].copy_(on_device(torch.cat([slots, scrap_slots]), device), non_blocking=True)


class Capture(Protocol):
    """Records a function of no arguments."""

    def __call__(self, compute: Compute) -> Compute:
        """A function that runs `compute` again, on what its tensors hold by then."""
