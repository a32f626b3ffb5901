"""`ResidualHeads`: the heads of Medusa and Hydra, residual layers with a vocabulary projection each."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from emssd_heads.loading import HeadFiles

__all__ = ["ResidualHeads", "counted"]


class ResidualHeads(nn.Module):
    """One head for each level of a draft, without a KV cache.

    Args:
        reads: elements that each head reads; all layers give `hidden_size`.
        num_tokens: that a head drafts.
        names: of the module's tensors that the checkpoint has.
    """

    def __init__(
        self, reads: Seq[int], num_layers: int, hidden_size: int, num_tokens: int, names: Container[str]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(
                    _Residual(f"layers.{head}.{layer}.", hidden_size if layer else width, hidden_size, names)
                    for layer in range(num_layers)
                )
            )
            for head, width in enumerate(reads)
        )
        self.projections = nn.ModuleList(
            nn.Linear(hidden_size, num_tokens, bias=f"projections.{head}.bias" in names) for head in range(len(reads))
        )
        self.target_ids: torch.Tensor | None  # [num_tokens] the target's ids of the tokens that can be drafted
        self.register_buffer("target_ids", None, persistent=False)

    def __len__(self) -> int:
        return len(self.projections)

    def forward(self, head: int, inputs: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, num_tokens]`` of the head at number `head`, from its inputs ``[n, reads[head]]``."""
        return cast("torch.Tensor", self.projections[head](self.layers[head](inputs)))


class _Residual(nn.Module):
    """A linear layer with an activation, beside its input; an input of another size goes through a layer of its own."""

    def __init__(self, prefix: str, size: int, out: int, names: Container[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out, bias=f"{prefix}linear.bias" in names)
        self.res_connection: nn.Module = nn.Identity()
        if size != out:
            self.res_connection = nn.Linear(size, out, bias=f"{prefix}res_connection.bias" in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.res_connection(x) + F.silu(self.linear(x)))


def counted(files: HeadFiles, names: Mapping[str, str]) -> tuple[int, int]:
    """The number of heads, and of the layers of each, by the `names` of a module's tensors.

    Raises:
        ConfigError: there is no head.
    """
    if not any(name.startswith("projections.") for name in names):
        raise files.cannot("none of its weights is the vocabulary projection of a head")
    parts = [name.split(".") for name in names if name.startswith(("layers.", "projections."))]
    layers = [int(layer) for kind, _, layer, *_ in parts if kind == "layers"]
    return 1 + max(int(head) for _, head, *_ in parts), 1 + max(layers, default=-1)
