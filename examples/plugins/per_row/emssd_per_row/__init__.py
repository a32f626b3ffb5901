"""Plugin `backend=per_row`: keeps the KV of each sequence in tensors of its own."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.attention import AttentionBackend
from emssd.hooks import BackendSpec, hookimpl

__all__ = ["PerRowConfig", "emssd_attention_backends"]


@dataclass
class PerRowConfig:
    """`backend=per_row` has no options."""


def _build(config: PerRowConfig) -> AttentionBackend:
    from emssd_per_row.backend import PerRowBackend

    return PerRowBackend()


@hookimpl
def emssd_attention_backends() -> list[BackendSpec]:
    """Offer the backend."""
    return [BackendSpec("per_row", PerRowConfig, _build)]
