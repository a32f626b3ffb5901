"""`MtpHead`: a decoder layer of the target's own kind that reads a token's embedding and the state before, each normed.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, §2.2, equations 21 to 23.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any, cast

import torch
from torch import nn

from emssd.attention import LayerSpec
from emssd.errors import UnsupportedModelError
from emssd.model import ATTENTION_NAME
from emssd.model import Attend as LayerAttend
from emssd_heads import Attend, PairedHead
from emssd_heads.layers import attending

__all__ = ["MtpHead"]


class MtpHead(PairedHead):
    """A layer for multi-token prediction, between two norms of its inputs and one of its output.

    A feature is the target's last hidden state after its final norm. The output after the last norm is fed back, and
    logits are made of it. Unlike vLLM, and like DeepSeek's equations and Transformers, the embedding at position 0 is
    not replaced by zeros.

    Args:
        model: the target. Its code makes the layer, as one more after its own; its rotary angles are used.
    """

    def __init__(self, model: Any, dtype: torch.dtype, names: Container[str], vocab_size: int) -> None:
        decoder, config = model.get_decoder(), _with_one_more_layer(model.config.get_text_config(), dtype)
        size, last = int(config.hidden_size), decoder.layers[-1]
        super().__init__(size, None, vocab_size, names)
        self._rotary = (decoder.rotary_emb,)  # the target's own, which is no part of this module
        self._spec: LayerSpec | None = None
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(last.input_layernorm).to("meta") for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(last)(config, len(decoder.layers))

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Shape and rules of its attention, which its first pass shows."""
        if self._spec is None:
            seen = list[LayerSpec]()

            def attend(
                layer: int, spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
            ) -> torch.Tensor:
                seen.append(spec)
                return query.new_zeros(len(query), spec.num_qo_heads, spec.value_dim)

            weight = self.eh_proj.weight
            with torch.inference_mode():
                self._run(weight.new_zeros(1, 1, self.input_size), weight.new_zeros(1, 1, dtype=torch.int64), attend)
            if len(seen) != 1:
                raise UnsupportedModelError(f"{type(self.block).__name__} calls its attention {len(seen)} times")
            (self._spec,) = seen
        return (self._spec,)

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        (spec,) = self.specs

        def checked(
            layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if seen != spec:
                raise UnsupportedModelError(f"{type(self.block).__name__} changed its attention from {spec} to {seen}")
            return attend(0, query, key, value)

        return self._run(inputs, position_ids, checked)

    def _run(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: LayerAttend) -> torch.Tensor:
        embeds, features = inputs.chunk(2, dim=-1)
        fused = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(features)], dim=-1))
        (rotary,) = self._rotary
        with attending(attend):
            hidden = self.block(
                fused,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=rotary(fused, position_ids),
                use_cache=False,
            )
        return cast("torch.Tensor", self.norm(hidden))


def _with_one_more_layer(config: Any, dtype: torch.dtype) -> Any:
    """A copy of the target's config for the layer after its last one, which attends through emssd."""
    config = copy.deepcopy(config)
    config.num_hidden_layers += 1
    if types := getattr(config, "layer_types", None):
        config.layer_types = [*types, "full_attention"]
    if types := getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = [*types, types[-1]]
    config._attn_implementation = ATTENTION_NAME
    if dtype is torch.float64:  # for which PyTorch has no grouped matrix product
        config._experts_implementation = "eager"
    return config
