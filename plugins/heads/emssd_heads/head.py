"""`Head`: the interface of trained decoder layers that a `HeadRunner` runs; `LayerHead`, one plain layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from emssd.attention import KVCacheSpec, LayerSpec
from emssd_heads.config import DecoderConfig
from emssd_heads.layers import Attend, HeadLayer, HeadNorm, Rotary

__all__ = ["Head", "LayerHead"]


class Head(nn.Module, ABC):
    """Decoder layers that read one vector for each token, and no token ids.

    Attributes:
        input_size: elements of that vector.
        max_len: the longest sequence; ``None`` for any.
    """

    input_size: int
    max_len: int | None

    @property
    @abstractmethod
    def specs(self) -> tuple[LayerSpec, ...]:
        """Shape and rules of each attention layer."""

    @abstractmethod
    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states ``[b, n, hidden_size]`` of ``inputs [b, n, input_size]`` at ``position_ids [b, n]``."""

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[n, draft_vocab_size]`` after hidden states ``[n, hidden_size]`` that `forward` gave.

        ``None`` where they need the target's vocabulary projection.
        """
        return None

    def kv_cache_spec(self, target: KVCacheSpec) -> KVCacheSpec:
        """The KV cache that the head needs beside that of the target."""
        longest = target.max_model_len if self.max_len is None else min(target.max_model_len, self.max_len)
        return replace(target, layers=self.specs, max_model_len=longest, prefix_caching=False)


class LayerHead(Head):
    """A decoder layer and a norm. Each vector stands at its token's own position.

    Args:
        config: sizes and rules of the layer.
        names: of the module's tensors that the checkpoint has.
        mlp: whether the layer has an MLP after its attention.
    """

    def __init__(self, config: DecoderConfig, names: Container[str], *, mlp: bool = True) -> None:
        super().__init__()
        self.input_size, self.max_len = config.hidden_size, config.max_len
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList([HeadLayer(config, 0, names, mlp=mlp)])
        self.norm = HeadNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (cast("HeadLayer", self.layers[0]).spec,)

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        angles = self.rotary(position_ids, inputs.dtype)
        return cast("torch.Tensor", self.norm(self.layers[0](inputs, angles, attend)))
