"""Records forward passes as CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from emssd.attention.recorded import Compute
from emssd.errors import PluginError

__all__ = ["CudaGraphCapture"]


class CudaGraphCapture:
    """An `emssd.attention.recorded.Capture`. Its graphs share one memory pool and must not run at the same time."""

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
