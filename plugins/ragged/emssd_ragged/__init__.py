"""Plugin `backend=ragged`: the paper's method on any device, with an unpadded KV cache and unpadded inputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.attention import AttentionBackend
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import BackendSpec, offering

__all__ = ["Kernels", "RaggedConfig"]


class Kernels(Enum):
    """The kernels that compute attention."""

    auto = "auto"
    fused = "fused"
    torch = "torch"


@dataclass
class RaggedConfig:
    """Options of `backend=ragged`.

    Attributes:
        page_size: tokens per KV page. Memory is held in whole pages.
        kernels: what computes attention. fused makes one C++ call per layer, on CPUs and with page_size 16; it is
            built on first use. torch runs anywhere. auto is fused if possible, else torch.
    """

    page_size: AtLeastOne = 16
    kernels: Kernels = Kernels.auto


def _build(config: RaggedConfig) -> AttentionBackend:
    from emssd_ragged.backend import ragged_backend

    return ragged_backend(config.page_size, config.kernels)


emssd_attention_backends = offering(
    BackendSpec("ragged", RaggedConfig, _build, batch_invariant="on CPUs, by its C++ kernel")
)
