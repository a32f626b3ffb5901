"""Backend `recorded`: the loop of GPU backends, with its recordings, on reference kernels."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

from emssd.attention import PagedBackend
from emssd.hooks import BackendSpec, offering
from tests.support.reference_kernels import ReferenceKernels, rerun

POINT = EntryPoint("recorded", __name__, "emssd")


@dataclass
class RecordedConfig:
    """Options of `backend=recorded`."""

    page_size: int = 3


def _build(config: RecordedConfig) -> PagedBackend:
    kernels = ReferenceKernels(capture=rerun, max_graph_tokens=12)
    return PagedBackend(kernels, page_size=config.page_size, memory_fraction=1.0)


emssd_attention_backends = offering(BackendSpec("recorded", RecordedConfig, _build))
