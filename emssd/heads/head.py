"""`Head`: the interface of trained decoder layers that a `HeadLane` runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import nn

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.heads.layers import Attend

__all__ = ["Head"]


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
        """Logits ``[n, draft_vocab_size]`` behind hidden states ``[n, hidden_size]`` that `forward` gave.

        ``None`` where they need the target's vocabulary projection.
        """
        return None

    def kv_cache_spec(self, target: KVCacheSpec) -> KVCacheSpec:
        """The KV cache that the head needs beside that of the target."""
        longest = target.max_model_len if self.max_len is None else min(target.max_model_len, self.max_len)
        return replace(target, layers=self.specs, max_model_len=longest, prefix_caching=False)
