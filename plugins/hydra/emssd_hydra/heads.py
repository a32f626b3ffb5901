"""`HydraHeads`: heads that also read the tokens drafted before theirs.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109.
"""

from __future__ import annotations

from collections.abc import Container
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["HydraHeads"]


class HydraHeads(nn.Module):
    """Heads of multi-layer perceptrons. A head runs once for each node of a tree that gets children.

    Args:
        num_heads: how many levels can be drafted.
        num_layers: of each head, before its vocabulary projection.
        names: of the module's tensors that the checkpoint has.
    """

    def __init__(
        self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int, names: Container[str]
    ) -> None:
        super().__init__()
        self.mlp = nn.ModuleList(
            nn.Sequential(
                *(
                    _Residual(f"mlp.{h}.{layer}.", hidden_size * (1 if layer else h + 2), hidden_size, names)
                    for layer in range(num_layers)
                )
            )
            for h in range(num_heads)
        )
        self.projections = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=f"projections.{h}.bias" in names) for h in range(num_heads)
        )

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, vocab]`` of the children of n nodes of one level.

        Args:
            hidden: ``[n, hidden_size]``, of the token that the root was chosen from: the target's hidden state, or what
                the prefix layer of Hydra++ made of it.
            embeds: ``[n, h + 1, hidden_size]`` the target's embeddings of the tokens from the root to the node. Head
                `h` gives the logits, so that 0 is asked for the children of the root.
        """
        depth = embeds.shape[1] - 1
        inputs = torch.cat([hidden, embeds.flatten(1)], dim=-1)
        return cast("torch.Tensor", self.projections[depth](self.mlp[depth](inputs)))


class _Residual(nn.Module):
    """A layer that adds its input; where sizes differ, the input goes through a layer of its own."""

    def __init__(self, prefix: str, size: int, out: int, names: Container[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out, bias=f"{prefix}linear.bias" in names)
        self.res_connection: nn.Module = nn.Identity()
        if size != out:
            self.res_connection = nn.Linear(size, out, bias=f"{prefix}res_connection.bias" in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.res_connection(x) + F.silu(self.linear(x)))
