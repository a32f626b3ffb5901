"""`ParallelDrafter`: drafts all levels in one pass, with a head that was trained for that (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import torch

from emssd.decoding.packing import pack_nodes
from emssd.heads.paired import Level, Outputs, PairedDrafter, PairedRow, nodes_of
from emssd_eagle3.head import Eagle3Head
from emssd_eagle3.measuring import MeasuringDrafter

__all__ = ["MeasuringParallelDrafter", "ParallelDrafter"]


class ParallelDrafter(PairedDrafter):
    """Drafts with a head for which a mask stands in the place of each token that is drafted.

    Behind the pairs of a row, the head reads as many masks as the draft has further levels, in the same pass. The
    output behind the n-th is for all nodes of level ``n + 1``, whatever is above them.
    """

    _slots: dict[str, Outputs]  # by request id the outputs behind the last pair and the masks

    def _grow_chains(self, rows: Seq[PairedRow]) -> bool:
        return False  # one pass is all there is

    def _catch_up(self, rows: Seq[PairedRow]) -> Outputs:
        head = cast("Eagle3Head", self._head)
        mask, features, token_ids = head.mask_feature(), list[torch.Tensor](), list[int]()
        num_masks = [min(row.tree.depth - 1, row.tree.max_cached) for row in rows]
        lengths = list[int]()
        for row, more in zip(rows, num_masks, strict=True):
            new = row.pairs.new(row.tree.num_tokens)
            features += [new, mask.expand(more, -1)]
            token_ids += [*row.tokens[-len(new) :], *[head.mask_token_id or 0] * more]
            lengths.append(len(new) + more)
        kv_lens = [row.tree.num_tokens + more for row, more in zip(rows, num_masks, strict=True)]
        packed = pack_nodes([row.request_id for row in rows], torch.tensor(token_ids), lengths, kv_lens)
        wanted = [
            torch.arange(stop - 1 - more, stop) for stop, more in zip(packed.qo_indptr[1:], num_masks, strict=True)
        ]
        hidden, logits = self._run(replace(packed, logit_rows=torch.cat(wanted)), torch.cat(features))
        for row in rows:
            row.pairs.used(row.tree.num_tokens)
        sizes = [len(each) for each in wanted]
        slots = zip(torch.split(hidden, sizes), torch.split(logits, sizes), strict=True)
        self._slots = dict(zip((row.request_id for row in rows), slots, strict=True))
        return self._picked([(row.request_id, 0) for row in rows])

    def _compute(self, level: Level, before: Level, hidden: torch.Tensor) -> Outputs:
        return self._picked([(row.request_id, len(row.tree.way(node))) for row, node in nodes_of(level)])

    def _picked(self, places: Seq[tuple[str, int]]) -> Outputs:
        """The outputs of these slots."""
        hidden, logits = zip(*((each[place] for each in self._slots[name]) for name, place in places), strict=True)
        return torch.stack(hidden), torch.stack(logits)


class MeasuringParallelDrafter(MeasuringDrafter, ParallelDrafter):
    """Such a drafter whose file leaves open which hidden states its head reads."""
