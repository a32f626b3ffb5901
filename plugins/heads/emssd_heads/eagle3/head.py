"""`Eagle3Head`: one decoder layer, mostly, that reads a token's embedding beside a feature of the token before.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
arXiv 2503.01840; and the variants of other trainers.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

import torch
from torch import nn

from emssd_heads import Attend, HeadLayer, HeadNorm, PairedHead, Rotary, TargetSizes
from emssd_heads.eagle3.variant import Variant

__all__ = ["Eagle3Head"]


class Eagle3Head(PairedHead):
    """An EAGLE-3 head.

    Attributes:
        mask_token_id: of a head that drafts in parallel, the token in the place of those that are drafted.
    """

    def __init__(self, variant: Variant, names: Container[str], target: TargetSizes) -> None:
        config = variant.decoder
        super().__init__(config.hidden_size, config.max_len, target.vocab_size, names, variant.draft_vocab_size)
        self.logit_scale = variant.logit_scale
        self.rotary = Rotary(config)
        size, eps, num_features = config.hidden_size, config.rms_norm_eps, variant.num_features
        self._variant = variant
        if num_features:
            wide = num_features * target.hidden_size
            self.fc: nn.Module = nn.Linear(wide, size, bias="fc.bias" in names)
            if variant.norm_before_fc:
                self.input_norm = HeadNorm(wide, eps)
            if variant.fc_norm:
                self.fc_norm = nn.ModuleList(HeadNorm(target.hidden_size, eps) for _ in range(num_features))
            if variant.mask_token_id is not None:
                self.mask_hidden = nn.Parameter(torch.empty(1, 1, wide))
        self.mask_token_id = variant.mask_token_id
        first = HeadLayer(config, 0, names, input_size=2 * size)  # reads embeddings beside features, normed apart
        first.hidden_norm = HeadNorm(size, eps)
        self.layers = nn.ModuleList([first, *(HeadLayer(config, i, names) for i in range(1, config.num_layers))])
        self.norm = HeadNorm(size, eps)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._variant.num_features:
            return hidden
        if self._variant.norm_before_fc:
            hidden = self.input_norm(hidden)
        if self._variant.fc_norm:
            chunks = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return cast("torch.Tensor", self.fc(hidden))

    def mask_feature(self) -> torch.Tensor:
        """The feature ``[1, hidden_size]`` that stands beside `mask_token_id`."""
        return self.features(self.mask_hidden[0])

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        embeds, features = inputs.chunk(2, dim=-1)
        angles = self.rotary(position_ids, inputs.dtype)
        first: Any = self.layers[0]
        normed = first.hidden_norm(features)
        attended = torch.cat([first.input_layernorm(embeds), normed], dim=-1)
        hidden = first(normed if self._variant.norm_before_residual else features, angles, attend, attended)
        for layer in self.layers[1:]:
            hidden = layer(hidden, angles, attend)
        return cast("torch.Tensor", self.norm(hidden) if self._variant.norm_output else hidden)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._variant.norm_output else cast("torch.Tensor", self.norm(hidden))
