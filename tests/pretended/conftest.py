"""Engines on the pretended CUDA device, with reference kernels and the graphs of `backend=flashinfer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emssd_flashinfer
import pytest
import torch
from emssd_flashinfer import FlashInferConfig
from emssd_flashinfer.recorded import CudaGraphCapture
from emssd_flashinfer.tables import PagedMetadata, TreeMask

from emssd.attention import LayerSpec, PagedBackend
from emssd.model.compile.inductor import CompiledPasses
from emssd.model.compile.program import attend
from tests.support.pretended import PretendedCuda
from tests.support.reference_kernels import ReferenceAttention, ReferenceKernels

pytestmark = [
    pytest.mark.pretended,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs on that"),
]


class PretendedKernels(ReferenceKernels):
    """`ReferenceKernels`, each of which is one launch and no wait."""

    def __init__(self, device: PretendedCuda, **options: Any) -> None:
        super().__init__((8, 16, 64, 128, 256), **options)
        self._device = device

    def attention(self, layer: LayerSpec, *, masked: bool = False, static: Any = None) -> PretendedAttention:
        return PretendedAttention(super().attention(layer, masked=masked, static=static), self._device)


class PretendedAttention:
    """A `ReferenceAttention` on the device."""

    def __init__(self, attention: ReferenceAttention, device: PretendedCuda) -> None:
        self._attention, self._device = attention, device

    def plan(self, metadata: PagedMetadata, mask: TreeMask | None = None) -> None:
        self._device.unnoted(self._attention.plan)(metadata, mask)

    def run(self, *tensors: torch.Tensor) -> None:
        self._device.kernel(self._attention.run)(*tensors)


def untraced(module: Any, inputs: Any) -> Any:
    """A `emssd.model.compile.inductor.Compile` without a trace, as no compiler knows the device."""
    module._attend = attend  # the operator would hide its operations
    return module


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    """The device; ``backend=flashinfer`` works on it."""
    made = PretendedCuda()

    def build(config: FlashInferConfig) -> PagedBackend:
        capture = CudaGraphCapture() if config.cuda_graphs else None
        passes = CompiledPasses(untraced) if config.fused_kernels and config.cuda_graphs else None
        kernels = PretendedKernels(made, capture=capture, max_graph_tokens=64, passes=passes)
        return PagedBackend(kernels, memory_fraction=0.1)

    monkeypatch.setattr(emssd_flashinfer, "unavailable", lambda: None)
    monkeypatch.setattr(emssd_flashinfer, "_build", build)
    with made:
        yield made
