"""`BlockHead`: decoder layers that fill in a block of masks, and see the target's hidden states as keys and values.

Chen et al. 2026, DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.drafters import DecoderConfig, HeadLayer, HeadNorm, Rotary, TargetSizes
from emssd.heads import Embed, Project
from emssd.heads.layers import Angles, rotated
from emssd_dflash.variant import Variant

__all__ = ["BlockAttend", "BlockHead"]

BlockAttend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a layer's index, queries ``[m, num_heads, head_dim]`` of blocks, and keys and values ``[c + m, num_kv_heads,
head_dim]`` of features and blocks, what attention gives, ``[m, num_heads, head_dim]``."""


class _BlockLayer(HeadLayer):
    """A layer that computes keys and values of features too, which pass through no layer before it."""

    def __init__(self, config: DecoderConfig, index: int, names: Container[str]) -> None:
        super().__init__(config, index, names)
        self._index = index

    def block(self, hidden: torch.Tensor, features: torch.Tensor, angles: Angles, attend: BlockAttend) -> torch.Tensor:
        """Hidden states ``[m, hidden_size]`` of blocks.

        Args:
            hidden: ``[m, hidden_size]`` of blocks.
            features: ``[c, hidden_size]``; they are not normed again.
            angles: of features, and then of blocks.
            attend: computes attention.
        """
        own, normed = self.self_attn, self.input_layernorm(hidden)
        read = torch.cat([features, normed])
        by_head = (-1, own.spec.key_dim)
        query = own.q_norm(own.q_proj(normed).unflatten(-1, by_head))
        key = own.k_norm(own.k_proj(read).unflatten(-1, by_head))
        value = own.v_proj(read).unflatten(-1, by_head)
        num_features, (cos, sin) = len(features), angles
        query = rotated(query, (cos[num_features:], sin[num_features:]))
        out = attend(self._index, query, rotated(key, angles), value)
        hidden = hidden + own.o_proj(out.flatten(1))
        return cast("torch.Tensor", hidden + self.mlp(self.post_attention_layernorm(hidden)))


class BlockHead(nn.Module):
    """A DFlash or DSpark drafter.

    Args:
        variant: what kind it is.
        names: of the module's tensors that the checkpoint has.
        target: that it drafts for.

    Attributes:
        embed_tokens, lm_head: its own embeddings and vocabulary projection; ``None`` for the target's.
    """

    def __init__(self, variant: Variant, names: Container[str], target: TargetSizes) -> None:
        super().__init__()
        config = variant.decoder
        size, eps = config.hidden_size, config.rms_norm_eps
        self.variant = variant
        self.rotary = Rotary(config)
        self.fc = nn.Linear(len(variant.layers) * target.hidden_size, size, bias=False)
        self.hidden_norm = HeadNorm(size, eps)
        self.layers = nn.ModuleList(_BlockLayer(config, index, names) for index in range(config.num_layers))
        self.norm = HeadNorm(size, eps)
        own = {name: f"{name}.weight" in names for name in ("embed_tokens", "lm_head")}
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if own["embed_tokens"] else None
        self.lm_head = nn.Linear(size, target.vocab_size, bias=False) if own["lm_head"] else None
        if rank := variant.markov_rank:
            self.markov_head = _Markov(target.vocab_size, rank)
        if variant.has_confidence:
            self.confidence_head = _Confidence(size + (rank if variant.confidence_reads_markov else 0))

    def kv_cache_spec(self, target: KVCacheSpec) -> KVCacheSpec:
        """The KV cache that the head needs beside that of the target; see `emssd_dflash.lane`."""
        own = [cast("HeadLayer", layer).spec for layer in self.layers]
        specs = tuple(self._spec(*pair) for pair in zip(own, self.variant.causal, strict=True))
        longest = target.max_model_len + 2 * self.variant.block_size
        return replace(target, layers=specs, max_model_len=longest, trees=False, prefix_caching=False)

    def _spec(self, layer: LayerSpec, causal: bool) -> LayerSpec:
        if causal:
            return layer
        window = layer.sliding_window
        wide = None if window is None else window + self.variant.block_size
        return replace(layer, key_dim=layer.key_dim + 1, sliding_window=wide)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features ``[n, hidden_size]`` of the target's hidden states ``[n, num_states * target_hidden_size]``.

        Hidden states of one token stand beside each other, in the order of the variant's `layers`.
        """
        return cast("torch.Tensor", self.hidden_norm(self.fc(hidden)))

    def embed(self, token_ids: torch.Tensor, embed: Embed) -> torch.Tensor:
        """Embeddings ``[n, hidden_size]`` of ``token_ids [n]``, from the head's own table or the target's, scaled."""
        embeds = embed(token_ids) if self.embed_tokens is None else self.embed_tokens(token_ids)
        return embeds * self.variant.embedding_scale

    def logits(self, hidden: torch.Tensor, project: Project) -> torch.Tensor:
        """Logits ``[n, vocab]`` of ``hidden [n, hidden_size]`` behind the final norm."""
        return project(hidden) if self.lm_head is None else self.lm_head(hidden)

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, attend: BlockAttend
    ) -> torch.Tensor:
        """Hidden states ``[m, hidden_size]`` of blocks, before the final norm.

        Args:
            embeds: ``[m, hidden_size]`` of the tokens of blocks.
            features: ``[c, hidden_size]`` of tokens before them.
            position_ids: ``[c + m]`` of features, and then of blocks.
            attend: computes attention.
        """
        cos, sin = self.rotary(position_ids.unsqueeze(0), embeds.dtype)
        hidden = embeds
        for layer in self.layers:
            hidden = cast("_BlockLayer", layer).block(hidden, features, (cos[0], sin[0]), attend)
        return hidden


class _Markov(nn.Module):
    """What a token adds to the logits of the next one, by a table of low rank."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class _Confidence(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)
