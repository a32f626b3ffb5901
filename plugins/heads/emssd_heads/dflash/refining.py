"""Corrections of logits by other tokens of a block: tables, selectors and networks after a head's layers.

A `Markov` head is DSpark's (arXiv 2607.05147), a `Selector` DFlash2's (github.com/z-lab/dflash), a `Refiner` XPress's
(the library ``speculators`` 0.9).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Markov", "Refiner", "Selector", "Sizes"]

Sizes = Mapping[str, torch.Size]
"""Shapes of a head's tensors by name."""


def _linear(size: Sequence[int], bias: bool = False) -> nn.Linear:
    out_features, in_features = size
    return nn.Linear(in_features, out_features, bias=bias)


class Markov(nn.Module):
    """Adds logits that depend on the token before, by a table of low rank.

    With `gate_proj`, it reads the slot's hidden state, and with `joint_proj`, which is recurrent, the slots before.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        (vocab_size, rank), (drafted, _) = sizes["markov_w1.weight"], sizes["markov_w2.weight"]
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        self.gate_proj, self.joint_proj = (
            _linear(sizes[f"{name}.weight"], bias=True) if f"{name}.weight" in sizes else None
            for name in ("gate_proj", "joint_proj")
        )

    def start(self) -> torch.Tensor:
        """The memory ``[rank]`` before the first slot."""
        return self.markov_w1.weight.new_zeros(self.markov_w1.embedding_dim)

    def forward(
        self, logits: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[n, draft_vocab]`` of slots, and the memory ``[n, rank]`` for the next ones.

        Slots have `logits`, ``hidden [n, hidden_size]`` after the final norm, and ``before [n]`` the token before.
        """
        low = self.markov_w1(before)
        if self.gate_proj is not None:
            low = self.gate_proj(torch.cat([hidden, low], dim=-1)).sigmoid() * low
        elif self.joint_proj is not None:
            gate, new, out = self.joint_proj(torch.cat([memory, low, hidden], dim=-1)).chunk(3, dim=-1)
            gate, low = gate.sigmoid(), out.tanh()
            memory = gate * memory + (1 - gate) * new.tanh()
        return logits + self.markov_w2(low), memory


class Selector(nn.Module):
    """Scores a slot's likeliest tokens anew, by the token before and the hidden state."""

    def __init__(self, sizes: Sizes, top_k: int) -> None:
        super().__init__()
        self.predecessor_codebook, self.successor_codebook = (
            nn.Parameter(torch.empty(sizes[f"{name}_codebook"])) for name in ("predecessor", "successor")
        )
        self.hidden_projection = _linear(sizes["hidden_projection.weight"])
        self._top_k = top_k

    def start(self) -> torch.Tensor:
        """It has no memory."""
        return self.predecessor_codebook.new_zeros(0)

    def forward(
        self, logits: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Markov.forward`; tokens that are no candidates are impossible."""
        best, ids = logits.topk(min(self._top_k, logits.shape[-1]))
        code = (self.predecessor_codebook[before] * self.hidden_projection(hidden)).unsqueeze(-2)
        scores = best + (code * self.successor_codebook[ids]).sum(dim=-1)
        return torch.full_like(logits, -math.inf).scatter(-1, ids, scores), memory


class Refiner(nn.Module):
    """Reads all first choices of a block and corrects its logits, again and again."""

    def __init__(self, sizes: Sizes, num_passes: int) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(*sizes["token_embed.weight"])
        self.down_h, self.down_g, self.in_proj, self.mlp_gate, self.mlp_up, self.mlp_down, self.readout = (
            _linear(sizes[f"{name}.weight"])
            for name in ("down_h", "down_g", "in_proj", "mlp_gate", "mlp_up", "mlp_down", "readout")
        )
        self.mix_l = nn.Parameter(torch.empty(sizes["mix_l"]))
        self._num_passes = num_passes

    def forward(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        first: torch.Tensor,
        anchor: torch.Tensor | None,
        to_target: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Logits ``[r, block, draft_vocab]``, with ``hidden [r, block, hidden_size]`` after the final norm.

        The token before the first slot is ``first [r]``; the one of the first slot is ``anchor [r]``, unless it is
        drafted.
        """
        mean = hidden.mean(dim=1, keepdim=True).expand_as(hidden)
        read, refined = torch.cat([self.down_h(hidden), self.down_g(mean)], dim=-1), logits
        for _ in range(self._num_passes):
            chosen = to_target(refined.argmax(dim=-1))
            if anchor is not None:
                chosen[:, 0] = anchor
            before = torch.cat([first[:, None], chosen[:, :-1]], dim=1)
            x = self.in_proj(torch.cat([read, self.token_embed(before)], dim=-1))
            x = x + torch.einsum("ckj,njc->nkc", self.mix_l.tril(), x)
            x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
            refined = logits + self.readout(x)
        return refined
