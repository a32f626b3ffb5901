"""Steps of a few fixed sizes, so that their forward passes can be recorded once and replayed as CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import torch

from emssd.attention import PackedInputs
from emssd.attention.transfer import on_device
from emssd.errors import PluginError

__all__ = ["Capture", "Compute", "CudaGraphCapture", "StaticInputs", "ladder", "rung"]

Compute = Callable[[], torch.Tensor]


def ladder(max_tokens: int) -> tuple[int, ...]:
    """Token counts to record: all up to 8, then four in each doubling, so that padding stays below a quarter."""
    sizes = list(range(1, 9))
    step = 2
    while sizes[-1] < max_tokens:
        last = sizes[-1]
        sizes.extend(last + step * i for i in range(1, 5))
        step *= 2
    return tuple(size for size in sizes if size <= max_tokens)


def rung(sizes: tuple[int, ...], num_tokens: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_tokens`; ``None`` if they are too many."""
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else None


class StaticInputs:
    """The tensors that recorded passes read: their addresses never change, each step fills them anew.

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
        """Write one step: token 0 at position 0 for every padding token, and its KV to where nobody reads.

        Args:
            packed: the step.
            slots: ``[nnz]`` int64 of the host.
            scrap_slots: ``[padding]`` int64 of the host; their number is that of the padding tokens.
        """
        size, device = packed.num_tokens + len(scrap_slots), self.slots.device
        for buffer, real in (
            (self.input_ids, packed.input_ids),
            (self.position_ids, packed.position_ids),
            (self.logit_rows, packed.logit_rows),
        ):
            buffer[: len(real)].copy_(real, non_blocking=True)
            buffer[len(real) : size].zero_()
        self.slots[:size].copy_(on_device(torch.cat([slots, scrap_slots]), device), non_blocking=True)


class Capture(Protocol):
    """Records a function of no arguments."""

    def __call__(self, compute: Compute) -> Compute:
        """What runs `compute` again, on whatever its tensors hold by then."""


class CudaGraphCapture:
    """Records as CUDA graphs that share one memory pool; they must not run at the same time."""

    _WARM_UPS = 2  # passes that compile, tune and allocate what must not be allocated while recording

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Compute) -> Compute:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(self._WARM_UPS):
                compute()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PluginError(
                f"backend 'flashinfer' cannot record this model's forward pass as a CUDA graph: "
                f"{str(error).splitlines()[0].rstrip('.')}. Set backend.cuda_graphs=false"
            ) from error
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
