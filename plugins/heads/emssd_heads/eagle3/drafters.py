"""`ParallelDrafter`: drafts all levels in one pass, with a head that was trained for that (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import torch

from emssd.draft_models import GrowingRow, SlotDrafter, pack_nodes
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
        mask, features, token_ids, lengths = head.mask_feature(), list[torch.Tensor](), list[int](), list[int]()
        for row in rows:
            new, num_masks = self._states[row.request_id].new(row.tree.num_tokens), row.tree.depth - 1
            features += [new, mask.expand(num_masks, -1)]
            token_ids += [*row.tokens[-len(new) :], *[head.mask_token_id or 0] * num_masks]
            lengths.append(len(new) + num_masks)
        kv_lens = [row.tree.num_tokens + row.tree.depth - 1 for row in rows]
        packed = pack_nodes([row.request_id for row in rows], torch.tensor(token_ids), lengths, kv_lens)
        ends = zip(rows, packed.qo_indptr[1:], strict=True)
        packed = replace(packed, logit_rows=torch.cat([torch.arange(end - row.tree.depth, end) for row, end in ends]))
        logits = self._run(packed, self._inputs(packed.input_ids, torch.cat(features)))
        self._have_used(rows)
        return logits
