"""`PairedHead`: heads of EAGLE and of multi-token prediction, which read pairs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from typing import cast

import torch
from torch import nn

from emssd.attention import LayerSpec
from emssd.drafters.heads.head import Head
from emssd.drafters.heads.layers import HeadLayer
from emssd.drafters.heads.target import Embed, Project

__all__ = ["PairedHead"]


class PairedHead(Head):
    """A head that reads pairs: the embedding of token ``i + 1`` beside the feature of token ``i``, at position ``i``.

    The output there is for token ``i + 2``. A feature is made of the target's hidden states; in a draft, it is the
    head's own output for the token before.

    Args:
        hidden_size: of its hidden states.
        max_len: the longest sequence; ``None`` for any.
        vocab_size: the target's.
        names: of the module's tensors that the checkpoint has.

    Attributes:
        embed_tokens: its own embeddings; ``None`` for the target's.
        target_ids: ``[draft_vocab_size]`` the target's ids of the tokens that it drafts; ``None``: it drafts them all.
    """

    layers: nn.ModuleList
    target_ids: torch.Tensor | None

    def __init__(self, hidden_size: int, max_len: int | None, vocab_size: int, names: Container[str]) -> None:
        super().__init__()
        self.input_size, self.max_len = 2 * hidden_size, max_len
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size) if "embed_tokens.weight" in names else None
        self.register_buffer("target_ids", None, persistent=False)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(cast("HeadLayer", layer).spec for layer in self.layers)

    def embed(self, token_ids: torch.Tensor, embed: Embed) -> torch.Tensor:
        """Embeddings ``[…, hidden_size]`` of token ids, from the head's own table or the target's."""
        return embed(token_ids) if self.embed_tokens is None else self.embed_tokens(token_ids)

    def table(self, target: torch.Tensor | None) -> torch.Tensor | None:
        """``[vocab, hidden_size]`` what `embed` looks rows up in, its own or the target's; ``None`` if it does more."""
        return target if self.embed_tokens is None else self.embed_tokens.weight

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features ``[n, hidden_size]`` of the target's hidden states ``[n, states * target_hidden_size]``.

        Hidden states of one token stand beside each other, in the order in which the head names them.
        """
        return hidden

    @abstractmethod
    def logits(self, hidden: torch.Tensor, project: Project) -> torch.Tensor:
        """Logits ``[n, draft_vocab_size]`` after pairs of which `forward` gave ``hidden [n, hidden_size]``."""

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of columns of `logits`, of any shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]
