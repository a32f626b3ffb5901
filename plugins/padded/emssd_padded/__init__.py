"""Plugin `backend=padded`: the vanilla method of the EMS-SD paper (§3.1), with its two paddings as options."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.attention import AttentionBackend
from emssd.hooks import BackendSpec, offering

__all__ = ["PaddedConfig"]


@dataclass
class PaddedConfig:
    """Options of `backend=padded`. The four cells of the paper's ablation (Table 2) are presets:

    `padded` (both), `unpad_kv`, `unpad_inputs`, `unpad_both`.

    Attributes:
        pad_kv: all rows write their KV at the same place and advance by the longest acceptance of the batch. Shorter
            rows keep masked holes.
        pad_inputs: every row is fed as many tokens as the longest row.
    """

    pad_kv: bool = True
    pad_inputs: bool = True


def _build(config: PaddedConfig) -> AttentionBackend:
    from emssd_padded.backend import PaddedBackend

    return PaddedBackend(pad_kv=config.pad_kv, pad_inputs=config.pad_inputs)


emssd_attention_backends = offering(BackendSpec("padded", PaddedConfig, _build))
