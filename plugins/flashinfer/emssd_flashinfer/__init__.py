"""Plugin `backend=flashinfer`: says whether FlashInfer's kernels can run here. The backend itself is in the works."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.attention import AttentionBackend
from emssd.errors import PluginError
from emssd.hookspecs import Spec, hookimpl

__all__ = ["FlashInferConfig", "emssd_attention_backends", "unavailable"]


@dataclass
class FlashInferConfig:
    """`backend=flashinfer` has no options yet."""


def unavailable() -> str:
    """One sentence: why the backend cannot run on this machine, and what to use in its place."""
    import torch

    if torch.version.cuda is None:
        reason = f"it needs an NVIDIA GPU, and this PyTorch ({torch.__version__}) is built without CUDA"
    elif not torch.cuda.is_available():
        reason = "it needs an NVIDIA GPU, and PyTorch finds none on this machine"
    else:
        reason = "its CUDA kernels are not part of this version of emssd"
    return f"{reason}; use backend=ragged, which runs on any device"


def _build(config: FlashInferConfig) -> AttentionBackend:
    raise PluginError(f"backend 'flashinfer' is not available: {unavailable()}.")


@hookimpl
def emssd_attention_backends() -> list[Spec]:
    """Offer the name, so that asking for it gives the reason."""
    return [Spec("flashinfer", FlashInferConfig, _build, unavailable)]
