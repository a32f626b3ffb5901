"""Drafts with Medusa heads for the whole batch at once: combinations of what each head finds likely, or chains.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.
Its typical acceptance (§3.3) is not used, as it changes what is generated.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.drafters import (
    LAST_NORMED,
    GrowingRow,
    Lent,
    Shape,
    SlotDrafter,
    StatesDrafter,
    keep_bytes,
    shape_of,
)
from emssd.drafting import DrafterContext
from emssd.model import BorrowedTarget
from emssd_medusa import MedusaConfig
from emssd_medusa.heads import MedusaHeads
from emssd_medusa.loading import load_medusa

__all__ = ["MedusaDrafter"]


class MedusaDrafter(SlotDrafter, StatesDrafter):
    """Drafts with heads that have no KV cache and read nothing but a hidden state.

    All heads guess from the target's last hidden state of the token before the newest one: the target chose the newest
    token from it. The head at 0 guesses the first drafted token. No head knows what the others guess.

    Args:
        shape: of the trees; one child for each node makes chains.
    """

    hidden_layers = (LAST_NORMED,)
    reads_all = False

    def __init__(self, heads: MedusaHeads, shape: Shape, target: BorrowedTarget) -> None:
        super().__init__(shape, self.hidden_layers, target)
        self._heads, self.target_ids = heads, heads.target_ids

    @classmethod
    def load(cls, config: MedusaConfig, context: DrafterContext) -> MedusaDrafter:
        """Load the heads of `config`. Raises ConfigError: an option cannot work, or there are no such heads for this
        target; or OutOfMemoryError: the target's device has no room for them.
        """
        shape_of(config, "emssd_medusa", top_k=config.num_nodes)
        lent = Lent.by(context, "medusa")
        loaded = lent.loaded(config.path, load_medusa)
        if lent.compile:
            keep_bytes(loaded.head)
        shape = shape_of(config, "emssd_medusa", len(loaded.head.heads), top_k=config.num_nodes)
        return cls(loaded.head, shape, lent.target)

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        states = torch.cat([self._states[row.request_id].new(row.tree.num_tokens) for row in rows])
        logits: torch.Tensor = self._heads(states, max(row.tree.depth for row in rows))
        return torch.cat([logits[: row.tree.depth, place] for place, row in enumerate(rows)])
