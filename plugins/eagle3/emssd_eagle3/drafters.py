"""`ParallelDrafter`: drafts all levels in one pass, with a head that was trained for that (P-EAGLE).

And `MeasuringDrafter`: finds out which of the target's hidden states a head reads, where its file leaves that open.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import torch

from emssd.drafters import GrowingRow, Lent, PairedDrafter, PairedHead, Shape, SlotDrafter, pack_nodes
from emssd.drafting import Draft
from emssd.sequences import Batch
from emssd_eagle3.head import Eagle3Head

__all__ = ["ENOUGH", "MeasuringDrafter", "MeasuringParallelDrafter", "ParallelDrafter"]

logger = logging.getLogger("emssd")

ENOUGH = 64
"""Tokens of the running rows to measure with, and steps to wait for them at most."""
_MOST = 256  # tokens to measure with, as the logits of all are computed at once

Reading = tuple[int, ...]
"""The target's hidden states that make up a feature, in the order in which the head reads them."""

_Text = tuple[str, Seq[int], torch.Tensor]
"""Request id of a row, its tokens, and the features ``[n, 2, hidden]`` of its first pairs, of both readings."""


class MeasuringDrafter(PairedDrafter):
    """Drafts with a head that reads hidden states in one of two ways.

    It drafts nothing until `ENOUGH` tokens of prompts and outputs are known. Then it runs the head on them with either
    reading, and keeps the one with which the head's first choice is the next token more often. The target goes on to
    give the hidden states of both.

    Args:
        readings: the likelier first, which is kept if they do equally well.
    """

    def __init__(self, head: PairedHead, readings: tuple[Reading, Reading], shape: Shape, lent: Lent) -> None:
        super().__init__(head, tuple(dict.fromkeys(readings[0] + readings[1])), shape, lent)
        self._readings = readings
        self.reset()

    def reset(self) -> None:
        self._chosen: Reading | None = None
        self._num_waited = 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if self._chosen is None:
            self._sort_arrived()
            self._make_features(list(self._waiting))
            texts = self._texts(batch)
            self._num_waited += 1
            if sum(len(features) for *_, features in texts) < ENOUGH and self._num_waited < ENOUGH:
                return Draft.empty(len(batch))
            self._choose(texts)
        return super().propose(batch, budget)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """The features ``[n, hidden]`` of tokens; until a reading is chosen, of both: ``[n, 2, hidden]``."""
        states = dict(zip(self.hidden_layers, hidden.chunk(len(self.hidden_layers), dim=-1), strict=True))

        def of(reading: Reading) -> torch.Tensor:
            return self._head.features(torch.cat([states[layer] for layer in reading], dim=-1))

        return of(self._chosen) if self._chosen is not None else torch.stack([*map(of, self._readings)], dim=1)

    def _texts(self, batch: Batch) -> list[_Text]:
        """The rows of which a pair and the token that it foresees are known."""
        texts = list[_Text]()
        for row in batch:
            if (pairs := self._states.get(row.request_id)) is not None:
                num_pairs = min(pairs.stop, len(row.tokens) - 2, self._max_len)
                if num_pairs > 0:
                    texts.append((row.request_id, row.tokens, pairs.new(num_pairs)))
        return texts

    def _choose(self, texts: Seq[_Text]) -> None:
        """Keep the better reading, for the pairs that are known and for those to come."""
        share = max(1, _MOST // max(1, len(texts)))
        texts = [(name, tokens[: share + 2], features[:share]) for name, tokens, features in texts]
        room = self._runner.with_room([(name, len(features)) for name, _, features in texts])
        texts = [text for text, fits in zip(texts, room, strict=True) if fits]
        foreseen = [self._num_foreseen(texts, place) if texts else 0 for place in range(2)]
        place = int(foreseen[1] > foreseen[0])
        self._chosen = self._readings[place]
        for pairs in self._states.values():
            pairs.pieces = [features[:, place] for features in pairs.pieces]
        logger.info(
            "drafter=eagle3: of %d tokens, the head foresees %d with the hidden states %s, and %d with %s; it drafts "
            "with the %s (drafter.layer_ids=%s)",
            sum(len(features) for *_, features in texts),
            foreseen[0],
            self._readings[0],
            foreseen[1],
            self._readings[1],
            ("former", "latter")[place],
            "hs" if self._chosen == min(self._readings) else "output",  # which are one higher
        )

    def _num_foreseen(self, texts: Seq[_Text], place: int) -> int:
        """The number of tokens that are the head's first choice, with the reading at `place`."""
        names, lengths = [name for name, *_ in texts], [len(features) for *_, features in texts]
        starts, ends = list[int](), list[int]()
        for (_, tokens, _), length in zip(texts, lengths, strict=True):
            starts += tokens[1 : 1 + length]
            ends += tokens[2 : 2 + length]
        packed = pack_nodes(names, torch.tensor(starts), lengths, lengths)
        features = torch.cat([features[:, place] for *_, features in texts])
        logits = self._run(packed, self._inputs(packed.input_ids, features))
        self._runner.release(names)
        found = self._head.to_target(logits.argmax(dim=-1))
        return int((found == torch.tensor(ends, device=found.device)).sum())


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


class MeasuringParallelDrafter(MeasuringDrafter, ParallelDrafter):
    """Such a drafter whose file leaves open which hidden states its head reads."""
