"""`MedusaHeads`: from the hidden state of one token, a guess at each of the tokens that follow the next one.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.
"""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MedusaHeads"]


class MedusaHeads(nn.Module):
    """Medusa heads. They read the target's last hidden state, after its final norm, and have no KV cache.

    Args:
        num_heads: how many tokens are guessed.
        num_layers: residual layers of each head.
        num_tokens: tokens that can be drafted.
        names: of the module's tensors that the checkpoint has.
    """

    def __init__(
        self, num_heads: int, num_layers: int, hidden_size: int, num_tokens: int, names: Container[str]
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(_Residual(hidden_size, f"heads.{h}.{layer}.linear.bias" in names) for layer in range(num_layers)),
                nn.Linear(hidden_size, num_tokens, bias=False),
            )
            for h in range(num_heads)
        )
        self.target_ids: torch.Tensor | None  # [num_tokens] the target's ids of the tokens that can be drafted
        self.register_buffer("target_ids", None, persistent=False)

    def forward(self, hidden: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits of the tokens that follow the next one.

        Args:
            hidden: ``[n, hidden_size]``, of the token that the target chose its next token from.
            num_heads: the first so many alone; ``None`` for all.

        Returns:
            ``[num_heads, n, num_tokens]``. Those at 0 are for the token after the target's next one.
        """
        return torch.stack([head(hidden) for head in self.heads[:num_heads]])


class _Residual(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))
