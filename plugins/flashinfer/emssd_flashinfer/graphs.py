"""Records forward passes as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from emssd.errors import PluginError
from emssd_flashinfer.recorded import Compute

__all__ = ["CudaGraphCapture"]


class CudaGraphCapture:
    """An `emssd_flashinfer.recorded.Capture`. Its graphs share one memory pool and must not run at the same time.

    All are recorded on one stream, as cuBLAS keeps a workspace for each stream that it has seen.
    """

    _WARM_UPS = 2  # passes that compile, tune and allocate what must not be allocated while recording

    def __init__(self) -> None:
        self._pool: Any = None
        self._side: Any = None

    def __call__(self, compute: Compute) -> Compute:
        main = torch.cuda.current_stream()
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
            gc.collect()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for _ in range(self._WARM_UPS):
                compute()
        main.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._side):
                result = compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PluginError(
                f"backend 'flashinfer' cannot record this model's forward pass as a CUDA graph: "
                f"{str(error).splitlines()[0].rstrip('.')}. Set backend.cuda_graphs=false"
            ) from error
        self._pool = graph.pool()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within, no garbage is collected: to free another graph, say, can break the recording of one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
