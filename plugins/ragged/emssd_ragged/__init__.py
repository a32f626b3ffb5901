"""Plugin `backend=ragged`: the paper's method in pure PyTorch, unpadded KV cache and unpadded inputs."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.attention import AttentionBackend
from emssd.hookspecs import Spec, hookimpl

__all__ = ["RaggedConfig", "emssd_attention_backends"]


@dataclass
class RaggedConfig:
    """Options of `backend=ragged`.

    Attributes:
        page_size: tokens per KV page. Memory is held in whole pages.
    """

    page_size: int = 16


def _build(config: RaggedConfig) -> AttentionBackend:
    from emssd_ragged.backend import RaggedBackend

    return RaggedBackend(page_size=config.page_size)


@hookimpl
def emssd_attention_backends() -> list[Spec]:
    """Offer the backend."""
    return [Spec("ragged", RaggedConfig, _build)]
