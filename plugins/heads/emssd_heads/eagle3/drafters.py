"""`ParallelDrafter`: drafts all levels in one pass, with a head that was trained for that (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import cast

import torch

from emssd.draft_models import GrowingRow, SlotDrafter
from emssd_heads import PairedDrafter
from emssd_heads.eagle3.head import Eagle3Head

__all__ = ["ParallelDrafter"]


class ParallelDrafter(SlotDrafter, PairedDrafter):
    """Drafts with a head for which a mask stands in the place of each token that is drafted.

    After the pairs of a row, the head reads as many masks as the draft has further levels, in the same pass. The
    output at the n-th is for all nodes of level ``n + 1``.
    """

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        head = cast("Eagle3Head", self._head)
        packed, features = self.pack_new(rows, (head.mask_token_id or 0, head.mask_feature()))
        logits = self._run(packed, self._inputs(packed.input_ids, features))
        self._have_used(rows)
        return logits
