"""Ragged verification: KV in pages, unpadded inputs; attention in C++ where it can be, else in PyTorch."""

from __future__ import annotations

import warnings

from emssd.attention import KVCacheSpec, KVPool, PagedBackend, PagedKernels
from emssd.errors import ConfigError
from emssd_ragged import Kernels
from emssd_ragged.fused import PAGE_SIZE, FusedKernels, why_not_fused
from emssd_ragged.grouped import GroupedKernels

__all__ = ["ragged_backend"]


def ragged_backend(page_size: int = PAGE_SIZE, kernels: Kernels | str = Kernels.auto) -> PagedBackend:
    """`PagedBackend` with the kernels of this plugin, in a pool that grows; see `emssd_ragged.RaggedConfig`."""
    choice: dict[Kernels, tuple[PagedKernels, ...]] = {
        Kernels.auto: (FusedKernels(), _InPlaceOfFused()),
        Kernels.fused: (FusedKernels(),),
        Kernels.torch: (GroupedKernels(),),
    }
    try:
        chosen = choice[Kernels(kernels)]
    except ValueError:
        names = ", ".join(option.value for option in Kernels)
        raise ConfigError(f"backend.kernels is {kernels!r}; choose {names}") from None
    return PagedBackend(*chosen, page_size=page_size)


class _InPlaceOfFused(GroupedKernels):
    """PyTorch where the fused kernel cannot serve. It warns where this costs time that the user did not ask for."""

    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        super().allocate(spec, pool)
        if spec.device.type == "cpu" and pool.page_size == PAGE_SIZE:
            warnings.warn(
                f"attention runs in PyTorch, which takes several times as long as the fused kernel: "
                f"{why_not_fused(spec, PAGE_SIZE)}. Set backend.kernels=torch to have it without this warning",
                RuntimeWarning,
                stacklevel=2,
            )
