"""Plugin `backend=reference`, for tests alone: paged kernels on the CPU that take token trees."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

from emssd.attention import AttentionBackend, PagedBackend
from emssd.hooks import BackendSpec, hookimpl
from tests.support.reference_kernels import ReferenceKernels

__all__ = ["POINT", "ReferenceConfig", "emssd_attention_backends"]

POINT = EntryPoint("reference", "tests.support.paged_plugin", "emssd")


@dataclass
class ReferenceConfig:
    """Options of `backend=reference`.

    Attributes:
        page_size: tokens per page.
    """

    page_size: int = 4


def _build(config: ReferenceConfig) -> AttentionBackend:
    return PagedBackend(ReferenceKernels(), page_size=config.page_size)


@hookimpl
def emssd_attention_backends() -> list[BackendSpec]:
    """Offer the backend."""
    return [BackendSpec("reference", ReferenceConfig, _build)]
