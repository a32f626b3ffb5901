"""Drafts chains for the whole batch in one pass of a head over a block of each row.

Chen et al. 2026, DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import torch

from emssd.attention.transfer import on_device
from emssd.decoding.choosing import first_node
from emssd.drafters import joined_chains, parallel_chains
from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.drafting.levels import with_room
from emssd.drafting.shapes import check_at_least_one
from emssd.errors import ConfigError
from emssd.heads.lent import Lent
from emssd.model import BorrowedTarget
from emssd.sampling.choice import Node
from emssd.sequences import Batch
from emssd_dflash import DFlashConfig
from emssd_dflash.features import KnownFeatures
from emssd_dflash.loading import load_dflash
from emssd_dflash.markov import markov_chains
from emssd_dflash.runner import BlockRow, BlockRunner

__all__ = ["DFlashDrafter"]

logger = logging.getLogger("emssd")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that is drafted for.

    Attributes:
        newest: its newest token, the first of its block.
        start: its position, and how many features come before.
        length: tokens to draft.
        node: where the target chooses the token behind the newest one.
    """

    request_id: str
    newest: int
    start: int
    length: int
    known: KnownFeatures
    node: Node


class DFlashDrafter(Drafter):
    """Drafts with a head that has a KV cache of its own.

    Its cache holds keys and values of features: what the target's hidden states of several layers give for each token
    that the target has computed, at the token's own position. A block is a row's newest token and then masks. It is
    always as long as the head was trained for, and its KV is dropped at once.

    A row is drafted for once the target has computed all of its tokens but the newest, so not in its first step.

    Args:
        runner: of the head.
        target: whose embeddings and vocabulary projection the head borrows.
        num_speculative_tokens: the most tokens per row and step, at most what a block gives.
    """

    def __init__(self, runner: BlockRunner, target: BorrowedTarget, num_speculative_tokens: int) -> None:
        self._runner, self._head, self._target = runner, runner.head, target
        self._variant = runner.head.variant
        self.hidden_layers, self.num_speculative_tokens = self._variant.layers, num_speculative_tokens
        self._known: dict[str, KnownFeatures] = {}

    @classmethod
    def load(cls, config: DFlashConfig, context: DrafterContext) -> DFlashDrafter:
        """Load the head of `config`.

        Raises:
            ConfigError: an option cannot work, or there is no such head for this target.
            OutOfMemoryError: the target's device has no room for it.
        """
        if config.path is None:
            raise ConfigError("drafter=dflash drafts with a trained head: give drafter.path=FOLDER, or a hub id")
        lent = Lent.by(context, "dflash")
        loaded = load_dflash(config.path, lent.target, context.vocab_size)
        for line in loaded.described:
            logger.info("drafter=dflash: %s", line)
        most = loaded.head.variant.num_drafts
        wanted = most if config.num_speculative_tokens is None else config.num_speculative_tokens
        check_at_least_one(num_speculative_tokens=wanted)
        if wanted > most:
            raise ConfigError(f"drafter.num_speculative_tokens is {wanted}; a block of this head drafts {most} at most")
        return cls(BlockRunner(loaded.head, lent.make_cache(loaded.head.kv_cache_spec(lent.spec))), lent.target, wanted)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = self._begin(batch, budget)
        if not rows:
            return Draft.empty(len(batch))
        hidden = self._compute(rows)
        size, lead = self._variant.block_size, 0 if self._variant.from_anchor else 1
        slots = [at * size + lead + slot for at, row in enumerate(rows) for slot in range(row.length)]
        hidden = hidden[on_device(slots, hidden.device)]
        hidden = self._head.norm(hidden)
        logits = self._head.logits(hidden, self._target.project)
        firsts, lengths = [row.node for row in rows], [row.length for row in rows]
        if self._variant.markov_rank:
            chains = markov_chains(self._head, firsts, lengths, [row.newest for row in rows], hidden, logits)
        else:
            chains = parallel_chains(firsts, lengths, logits)
        found = {row.request_id: chain for row, chain in zip(rows, chains, strict=True)}
        return joined_chains([found.get(row.request_id, []) for row in batch])

    def observe(self, outcome: Outcome) -> None:
        """Keep the features of all tokens that the target has computed."""
        if (hidden := outcome.hidden) is None:
            return
        features = self._head.features(torch.cat(hidden.states, dim=-1))
        for name, start, (own,) in replace(hidden, layers=(0,), states=(features,)).rows():
            self._known.setdefault(name, KnownFeatures()).add(start, own)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._runner.release(request_ids)
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def _begin(self, batch: Batch, budget: Seq[int]) -> list[_Row]:
        """The rows that may and can draft."""
        rows, longest = list[_Row](), self._variant.decoder.max_len
        for row, limit in zip(batch, budget, strict=True):
            start, known = len(row.tokens) - 1, self._known.get(row.request_id)
            length = min(limit, self.num_speculative_tokens, row.num_remaining - 1)
            too_long = longest is not None and start + self._variant.block_size > longest
            if known is not None and known.covers(start) and length > 0 and not too_long:
                rows.append(_Row(row.request_id, row.tokens[-1], start, length, known, first_node(row)))
        held = {name: known.num_cached for name, known in self._known.items() if known.num_cached}
        wanted = [(row.request_id, row.start + self._runner.num_slots) for row in rows]
        fitting = with_room(self._runner.fits, held, wanted)
        return [row for row, fits in zip(rows, fitting, strict=True) if fits]

    def _compute(self, rows: Seq[_Row]) -> torch.Tensor:
        """The hidden states ``[r * block_size, hidden]`` of blocks, before the final norm."""
        masks = [self._variant.mask_token_id] * (self._variant.block_size - 1)
        ids = on_device([token for row in rows for token in (row.newest, *masks)], self._target.device)
        blocks = [BlockRow(row.request_id, row.start, row.known.new(row.start)) for row in rows]
        hidden = self._runner.run(blocks, self._head.embed(ids, partial(self._target.embed, raw=True)))
        for row in rows:
            row.known.computed(row.start)
        return hidden
