"""`Head`: the interface of trained decoder layers that a `HeadRunner` runs; `Vocabulary`, the tables of a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from emssd.attention import KVCacheSpec, LayerSpec
from emssd_heads.config import DecoderConfig, Embed, Project
from emssd_heads.layers import Attend, HeadLayer, HeadNorm, Rotary

__all__ = ["Head", "LayerHead", "Vocabulary"]


class Head(nn.Module, ABC):
    """Decoder layers that read one vector for each token, and no token ids.

    Attributes:
        input_size: elements of that vector.
        max_len: the longest sequence; ``None`` for any.
    """

    input_size: int
    max_len: int | None
    layers: nn.ModuleList

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Shape and rules of each attention layer, by default of its `HeadLayer` s."""
        return tuple(cast("HeadLayer", layer).spec for layer in self.layers)

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
    """A `HeadLayer` and a norm. Each vector stands at its token's own position."""

    def __init__(self, config: DecoderConfig, names: Container[str], *, mlp: bool = True) -> None:
        super().__init__()
        self.input_size, self.max_len = config.hidden_size, config.max_len
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList([HeadLayer(config, 0, names, mlp=mlp)])
        self.norm = HeadNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        angles = self.rotary(position_ids, inputs.dtype)
        return cast("torch.Tensor", self.norm(self.layers[0](inputs, angles, attend)))


class Vocabulary(nn.Module):
    """The embeddings and the vocabulary projection of a head: its own if the checkpoint has them, or the target's.

    Args:
        names: of the module's tensors that the checkpoint has.
        draft_vocab_size: tokens that the head drafts; all of the target's by default.

    Attributes:
        embed_tokens, lm_head: its own tables; ``None`` for the target's.
        logit_scale: factor of all logits.
        target_ids: ``[draft_vocab_size]`` the target's ids of the tokens that it drafts; ``None``: it drafts them all.
    """

    logit_scale = 1.0
    target_ids: torch.Tensor | None

    def __init__(
        self, hidden_size: int, vocab_size: int, names: Container[str], draft_vocab_size: int | None = None
    ) -> None:
        super().__init__()
        num_drafted = draft_vocab_size or vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size) if "embed_tokens.weight" in names else None
        self.lm_head = nn.Linear(hidden_size, num_drafted, bias=False) if "lm_head.weight" in names else None
        self.register_buffer("target_ids", None, persistent=False)

    def embed(self, token_ids: torch.Tensor, embed: Embed) -> torch.Tensor:
        """Embeddings ``[…, hidden_size]`` of token ids, from the head's own table or the target's."""
        return embed(token_ids) if self.embed_tokens is None else self.embed_tokens(token_ids)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input ``[n, hidden_size]`` of the vocabulary projection, from the head's outputs."""
        return hidden

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits as `logits` gives them; ``None`` if these need the target's vocabulary projection."""
        return None if self.lm_head is None else self._scaled(self.lm_head(self.normed(hidden)))

    def logits(self, hidden: torch.Tensor, project: Project) -> torch.Tensor:
        """Logits ``[n, draft_vocab_size]`` after the head's outputs ``hidden [n, hidden_size]``."""
        if (logits := self.own_logits(hidden)) is not None:
            return logits
        logits = project(self.normed(hidden))
        return self._scaled(logits if self.target_ids is None else logits[:, self.target_ids])

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of columns of `logits`, of any shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    @property
    def described(self) -> str:
        """The owners of both tables, in words."""
        owners = ["the target’s" if table is None else "its own" for table in (self.embed_tokens, self.lm_head)]
        return "embeddings {}, vocabulary projection {}".format(*owners)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.logit_scale == 1 else logits * self.logit_scale
