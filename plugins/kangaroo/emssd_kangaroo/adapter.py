"""`KangarooAdapter`: one attention layer without MLP that reads the residual stream of an early layer, and a norm.

Liu et al. 2024, "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", arXiv 2404.18911, §3.1.
"""

from __future__ import annotations

from collections.abc import Container
from typing import cast

import torch
from torch import nn

from emssd.attention import LayerSpec
from emssd.heads import Attend, DecoderConfig, Head, HeadNorm, Rotary
from emssd.heads.layers import Angles, HeadAttention

__all__ = ["KangarooAdapter"]


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, names: Container[str]) -> None:
        super().__init__()
        self.input_layernorm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config, 0, names, "layers.0.", config.hidden_size)

    def forward(self, hidden: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        return cast("torch.Tensor", hidden + self.self_attn(self.input_layernorm(hidden), angles, attend))


class KangarooAdapter(Head):
    """An adapter. Token ``i`` stands with its own residual stream at position ``i``, without a shift.

    Args:
        config: sizes and rules of its layer.
        names: of the module's tensors that the checkpoint has.
    """

    def __init__(self, config: DecoderConfig, names: Container[str]) -> None:
        super().__init__()
        self.input_size, self.max_len = config.hidden_size, config.max_len
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList([_Layer(config, names)])
        self.norm = HeadNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (cast("_Layer", self.layers[0]).self_attn.spec,)

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the target's LM head makes logits of, ``[b, n, hidden_size]``.

        Args:
            inputs: ``[b, n, hidden_size]`` the residual stream behind the target's first layers.
            position_ids: ``[b, n]``.
            attend: computes attention.
        """
        hidden = self.layers[0](inputs, self.rotary(position_ids, inputs.dtype), attend)
        return cast("torch.Tensor", self.norm(hidden))
