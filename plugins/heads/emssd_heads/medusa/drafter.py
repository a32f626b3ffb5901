"""Drafts with Medusa heads for the whole batch at once: combinations of what each head finds likely, or chains.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.
Its typical acceptance (§3.3) is not used, as it changes what is generated.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.draft_models import GrowingRow, Shape, SlotDrafter
from emssd.model import BorrowedTarget
from emssd_heads import LAST_NORMED, StatesDrafter
from emssd_heads.residual import ResidualHeads

__all__ = ["MedusaDrafter"]


class MedusaDrafter(SlotDrafter, StatesDrafter):
    """Drafts with heads that have no KV cache and read nothing but a hidden state.

    All heads guess from the target's last hidden state of the token before the newest one: the target chose the newest
    token from it. The head at 0 guesses the first drafted token. No head knows what the others guess.
    """

    hidden_layers = (LAST_NORMED,)
    reads_all = False

    def __init__(self, heads: ResidualHeads, shape: Shape, target: BorrowedTarget) -> None:
        super().__init__(shape, self.hidden_layers, target)
        self._heads, self.target_ids = heads, heads.target_ids

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        states = torch.cat([self._states[row.request_id].new(row.tree.num_tokens) for row in rows])
        logits = torch.stack([self._heads(head, states) for head in range(max(row.tree.depth for row in rows))])
        return torch.cat([logits[: row.tree.depth, index] for index, row in enumerate(rows)])
