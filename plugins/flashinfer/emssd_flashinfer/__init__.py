"""Plugin `backend=flashinfer`: the paper's method at full speed, with FlashInfer's paged attention on an NVIDIA GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from emssd.attention import AttentionBackend, PagedBackend
from emssd.errors import PluginError
from emssd.errors.ranges import AtLeastOne, Meta
from emssd.hooks import BackendSpec, hookimpl

__all__ = ["FlashInferConfig", "unavailable"]


@dataclass
class FlashInferConfig:
    """Options of `backend=flashinfer`.

    Attributes:
        page_size: tokens per KV page. Memory is held in whole pages.
        cuda_graphs: replay the forward passes of small steps as CUDA graphs, one for each of a ladder of token counts.
        max_graph_tokens: steps with more tokens, which are prompts, run without a graph.
        fused_kernels: Inductor compiles the forward pass of recorded steps, all but attention, which takes about a
            minute. It takes Triton, which comes with PyTorch. A model that cannot be compiled, or that differs by more
            than roundings, is recorded as it is, with a warning.
        memory_fraction: the KV pool is allocated at once, for a full batch of the longest sequences. It takes at most
            this fraction of the free GPU memory, and at most ``kv_memory``. If the batch does not fit, rows wait.
    """

    page_size: AtLeastOne = 16
    cuda_graphs: bool = True
    max_graph_tokens: AtLeastOne = 512
    fused_kernels: bool = True
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.8


def unavailable() -> str | None:
    """One sentence: why the backend cannot run on this machine, and what to do about it; ``None`` if it can."""
    from emssd_flashinfer.availability import reason

    why_not = reason()
    return why_not and f"{why_not}; use backend=ragged, which runs on any device"


def _build(config: FlashInferConfig) -> AttentionBackend:
    if why_not := unavailable():
        raise PluginError(f"backend 'flashinfer' is not available: {why_not}.")
    from emssd.model import CompiledPasses
    from emssd_flashinfer.kernels import FlashInferKernels
    from emssd_flashinfer.recorded import CudaGraphCapture

    kernels = FlashInferKernels(
        capture=CudaGraphCapture() if config.cuda_graphs else None,
        max_graph_tokens=config.max_graph_tokens,
        passes=CompiledPasses() if config.cuda_graphs and config.fused_kernels else None,
    )
    return PagedBackend(kernels, page_size=config.page_size, memory_fraction=config.memory_fraction)


@hookimpl
def emssd_attention_backends() -> list[BackendSpec]:
    """Offer the backend."""
    return [BackendSpec("flashinfer", FlashInferConfig, _build, unavailable)]
