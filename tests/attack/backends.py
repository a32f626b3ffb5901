"""Backends of histories: those without a GPU, and `recorded`, the loop of GPU backends on reference kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from emssd.attention import PagedBackend
from emssd.hooks import BackendSpec, offering
from emssd.hooks.registry import Registry
from tests.support.backends import CONFIGS
from tests.support.reference_kernels import ReferenceKernels, rerun


@dataclass
class RecordedConfig:
    """Options of `backend=recorded`."""

    page_size: int = 3


def _build(config: RecordedConfig) -> PagedBackend:
    kernels = ReferenceKernels(capture=rerun, max_graph_tokens=12)
    return PagedBackend(kernels, page_size=config.page_size, memory_fraction=1.0)


emssd_attention_backends = offering(BackendSpec("recorded", RecordedConfig, _build))
BACKENDS = CONFIGS | {"recorded": RecordedConfig()}


@cache
def registry() -> Registry:
    """The installed plugins, and this one; to find them takes longer than most histories."""
    return Registry([*entry_points(group="emssd"), EntryPoint("recorded", __name__, "emssd")])
