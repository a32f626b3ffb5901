"""`BlockHead`: decoder layers that fill in a block of masks, and see the target's hidden states as keys and values.

Chen et al. 2026, DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from emssd.attention import KVCacheSpec, LayerSpec
from emssd_heads import Angles, Embed, HeadLayer, HeadNorm, Rotary, TargetSizes
from emssd_heads.dflash.refining import Markov, Refiner, Selector, Sizes
from emssd_heads.dflash.variant import Variant
from emssd_heads.head import Vocabulary
from emssd_heads.layers import rotated

__all__ = ["BlockAttend", "BlockHead"]

BlockAttend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention ``[m, num_heads, head_dim]`` of a layer's index, queries of blocks, of that shape, and keys and values of
features and blocks, ``[c + m, num_kv_heads, head_dim]``."""


class _Convolution(nn.Module):
    """Mixes each token of a block with those before it, by weights that the token gives; of DFlash2."""

    def __init__(self, sizes: Sizes, block_size: int) -> None:
        super().__init__()
        (_, taps, size), (width, _) = sizes["base_kernel"], sizes["kernel_projection.weight"]
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = nn.Linear(size, width, bias=False)
        self._taps, self._group, self._block_size = taps, size * 2 * taps // width, block_size

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """``[m, size]`` mixed, and a function that mixes an output ``[m, size]``."""
        added = self.kernel_projection(x).view(len(x), 2, self._taps, -1).repeat_interleave(self._group, dim=-1)
        kernels = self.base_kernel + added
        return self._mixed(x, kernels[:, 0]), lambda out: self._mixed(out, kernels[:, 1])

    def _mixed(self, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        blocks, mixed = x.view(-1, self._block_size, x.shape[-1]), torch.zeros_like(x)
        for tap in range(self._taps):
            earlier = F.pad(blocks[:, : self._block_size - tap], (0, 0, tap, 0))
            mixed = mixed + earlier.flatten(0, 1) * kernels[:, tap]
        return mixed


class _BlockLayer(HeadLayer):
    """A layer that computes keys and values of features too, which pass through no layer before it."""

    def __init__(self, variant: Variant, index: int, names: Container[str]) -> None:
        super().__init__(variant.decoder, index, names)
        self._index = index
        self.attention_conv, self.mlp_conv = (
            _Convolution(sizes, variant.block_size) if (sizes := variant.sizes(f"layers.{index}.{name}.")) else None
            for name in ("attention_conv", "mlp_conv")
        )

    def block(self, hidden: torch.Tensor, features: torch.Tensor, angles: Angles, attend: BlockAttend) -> torch.Tensor:
        """Hidden states ``[m, hidden_size]`` of blocks, from `hidden` of that shape.

        The `features` ``[c, hidden_size]`` are not normed again; their `angles` come before the angles of blocks.
        """
        attention, normed, finish = self.self_attn, self.input_layernorm(hidden), _unchanged
        if self.attention_conv is not None:
            normed, finish = self.attention_conv(normed)
        read = torch.cat([features, normed])
        by_head = (-1, attention.spec.key_dim)
        query = attention.q_norm(attention.q_proj(normed).unflatten(-1, by_head))
        key = attention.k_norm(attention.k_proj(read).unflatten(-1, by_head))
        value = attention.v_proj(read).unflatten(-1, by_head)
        num_features, (cos, sin) = len(features), angles
        query = rotated(query, (cos[num_features:], sin[num_features:]))
        out = attend(self._index, query, rotated(key, angles), value)
        hidden = hidden + finish(attention.o_proj(out.flatten(1)))
        normed, finish = self.post_attention_layernorm(hidden), _unchanged
        if self.mlp_conv is not None:
            normed, finish = self.mlp_conv(normed)
        return hidden + finish(self.mlp(normed))


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class BlockHead(Vocabulary):
    """A DFlash, DFlash2, DSpark or XPress drafter.

    Attributes:
        follows: corrects a slot's logits once the token before is chosen; ``None`` without.
        refines: corrects those of a whole block at once; ``None`` without.
    """

    def __init__(self, variant: Variant, names: Container[str], target: TargetSizes) -> None:
        config = variant.decoder
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(size, target.vocab_size, names, variant.draft_vocab_size)
        self.variant = variant
        self.rotary = Rotary(config)
        self.fc = nn.Linear(len(variant.layers) * target.hidden_size, size, bias=False)
        self.hidden_norm = HeadNorm(size, eps)
        self.layers = nn.ModuleList(_BlockLayer(variant, index, names) for index in range(config.num_layers))
        self.norm = HeadNorm(size, eps)
        if sizes := variant.sizes("markov_head."):
            self.markov_head = Markov(sizes)
        if sizes := variant.sizes("candidate_selector."):
            self.candidate_selector = Selector(sizes, variant.top_k)
        if sizes := variant.sizes("refiner_head."):
            self.refiner_head = Refiner(sizes, variant.num_passes)
        if variant.has_confidence:
            (width,) = variant.sizes("confidence_head.proj.")["weight"][1:]
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    @property
    def follows(self) -> Markov | Selector | None:
        return getattr(self, "markov_head", None) or getattr(self, "candidate_selector", None)

    @property
    def refines(self) -> Refiner | None:
        return getattr(self, "refiner_head", None)

    def kv_cache_spec(self, target: KVCacheSpec) -> KVCacheSpec:
        """The KV cache that the head needs beside that of the target; see `emssd_heads.dflash.runner`."""
        layers = [cast("HeadLayer", layer).spec for layer in self.layers]
        specs = tuple(self._spec(*pair) for pair in zip(layers, self.variant.causal, strict=True))
        longest = target.max_model_len + 2 * self.variant.block_size
        return replace(target, layers=specs, max_model_len=longest, trees=False, prefix_caching=False)

    def _spec(self, layer: LayerSpec, causal: bool) -> LayerSpec:
        if causal:
            return layer
        window = layer.sliding_window
        wide = None if window is None else window + self.variant.block_size
        return replace(layer, key_dim=layer.key_dim + 1, sliding_window=wide)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features ``[n, hidden_size]`` of the target's hidden states, ``[n, states * target_hidden_size]``."""
        return cast("torch.Tensor", self.hidden_norm(self.fc(hidden)))

    def embed(self, token_ids: torch.Tensor, embed: Embed) -> torch.Tensor:
        return super().embed(token_ids, embed) * self.variant.embedding_scale

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, attend: BlockAttend
    ) -> torch.Tensor:
        """Hidden states ``[m, hidden_size]`` of blocks, before the final norm.

        `embeds` ``[m, hidden_size]`` are of blocks, `features` ``[c, hidden_size]`` of tokens before them, and
        positions ``[c + m]`` of both in turn.
        """
        cos, sin = self.rotary(position_ids.unsqueeze(0), embeds.dtype)
        hidden = embeds
        for layer in self.layers:
            hidden = cast("_BlockLayer", layer).block(hidden, features, (cos[0], sin[0]), attend)
        return hidden
