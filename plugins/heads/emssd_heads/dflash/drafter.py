"""Drafts chains for the whole batch in one pass of a head over a block of each row.

Chen et al. 2026, DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147; see `emssd_heads.dflash.refining`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from emssd.attention import on_device
from emssd.draft_models import DynamicShape, GrowingRow, GrowingTree, Level, SlotDrafter, nodes_of
from emssd.model import BorrowedTarget
from emssd.sequences import Row
from emssd_heads import Format, HeadFiles, Loaded, StatesDrafter, TargetSizes
from emssd_heads.dflash.head import BlockHead
from emssd_heads.dflash.runner import BlockRow, BlockRunner
from emssd_heads.dflash.variant import variant_of

__all__ = ["BlockRunner", "DFlashDrafter", "load_dflash"]


class DFlashDrafter(SlotDrafter, StatesDrafter):
    """Drafts with a head that has a KV cache of its own, with keys and values of features.

    A feature is made of the target's hidden states of a token, at the token's own position. A block is a row's newest
    token and then masks. It is as long as the head was trained for, and its KV is dropped at once.

    Tokens are chosen one after the other if logits depend on the token before. A head may have a confidence of its own.
    """

    def __init__(self, runner: BlockRunner, target: BorrowedTarget, num_speculative_tokens: int) -> None:
        self._runner, self._head, self._variant = runner, runner.head, runner.head.variant
        shape = DynamicShape(num_speculative_tokens, num_speculative_tokens, 1)
        super().__init__(shape, self._variant.layers, target, runner)
        self.target_ids = runner.head.target_ids

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.features(hidden)

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        longest = self._variant.decoder.max_len
        too_long = longest is not None and len(row.tokens) - 1 + self._variant.block_size > longest
        return None if too_long else super().tree_of(row, num_nodes, depth)

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return self._runner.num_slots

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        size, lead = self._variant.block_size, 0 if self._variant.from_anchor else 1
        indices = [row * size + lead + slot for row, one in enumerate(rows) for slot in range(one.tree.depth)]
        hidden = self._blocks(rows)
        slots, self._memory = on_device(indices, hidden.device), dict[str, torch.Tensor]()
        if self._head.refines is not None:
            hidden = self._head.norm(hidden)
            self._hidden = hidden[slots]
            return self._refined(rows, hidden)[slots]
        self._hidden = self._head.norm(hidden[slots])
        return self._head.logits(self._hidden, self._target.project)

    def _refined(self, rows: Seq[GrowingRow], hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[r * block_size, draft_vocab]`` of all slots, of ``hidden [r * block_size, hidden]``."""
        head, in_blocks = self._head, (len(rows), self._variant.block_size)
        assert head.refines is not None
        logits = head.logits(hidden, self._target.project).view(*in_blocks, -1)
        anchor, before = (
            on_device([row.tokens[max(-back, -len(row.tokens))] for row in rows], hidden.device) for back in (1, 2)
        )
        first = (anchor, None) if self._variant.from_anchor else (before, anchor)
        refined: torch.Tensor = head.refines(logits, hidden.view(*in_blocks, -1), *first, head.to_target)
        return refined.flatten(0, 1)

    def _blocks(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """The hidden states ``[r * block_size, hidden]`` of blocks, before the final norm."""
        masks = [self._variant.mask_token_id] * (self._variant.block_size - 1)
        ids = on_device([token for row in rows for token in (row.tokens[-1], *masks)], self._target.device)
        starts = [(row.request_id, row.tree.num_tokens) for row in rows]
        blocks = [BlockRow(name, start, self._states[name].new(start)) for name, start in starts]
        hidden = self._runner.run(blocks, self._head.embed(ids, partial(self._target.embed, raw=True)))
        self._have_used(rows)
        return hidden

    def choices(self, level: Level, logits: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        follows = self._head.follows
        if follows is None and not self._variant.has_confidence:
            return super().choices(level, logits)
        nodes, slots = nodes_of(level), on_device(self._indices_of(level), self._logits.device)
        last = [row.tree.token_ids[node] if node >= 0 else row.tokens[-1] for row, node in nodes]
        before, read, logits = on_device(last, self._logits.device), self._hidden[slots], self._logits[slots]
        if follows is not None:
            memory = torch.stack([self._memory.get(row.request_id, follows.start()) for row, _ in nodes])
            logits, memory = follows(logits, read, before, memory)
            self._memory = {row.request_id: state for (row, _), state in zip(nodes, memory, strict=True)}
        tokens, log_probs = self._choices_from(level, logits)
        if self._variant.has_confidence:
            if self._variant.confidence_reads_markov:
                read = torch.cat([read, self._head.markov_head.markov_w1(before)], dim=-1)
            sure = self._head.confidence_head["proj"](read).double().sigmoid().log().flatten().tolist()
            log_probs = [[log_prob] * len(ranked) for log_prob, ranked in zip(sure, tokens, strict=True)]
        return tokens, log_probs


def load_dflash(path: str, target: TargetSizes, model: Any) -> Loaded[BlockHead]:
    """Load a head. Tables of embeddings and logits that are copies of those of the target, `model`, are not kept."""
    files = HeadFiles.read(path, target, Format.dflash, new_name=lambda name: name.removeprefix("model."))
    files.drop_copies(model)
    variant = variant_of(files)
    head = files.filled(lambda: BlockHead(variant, files.names, target))
    head.target_ids = files.drafted_ids(variant.draft_vocab_size)
    causal = [str(layer) for layer, is_causal in enumerate(variant.causal) if is_causal]
    sees = "which see each other" + (f" but in layers {', '.join(causal)}, which are causal" if causal else "")
    described = (
        f"{variant.kind} drafter, read from {files.checkpoint.source.name}",
        f"reads residual streams before layers {', '.join(map(str, variant.layers))}",
        f"blocks of {variant.block_size} tokens with mask {variant.mask_token_id}, "
        f"{'causal' if all(variant.causal) else sees}; a slot is for "
        f"{'the token behind it' if variant.from_anchor else 'its own token'}",
        variant.decoder.described,
    )
    return Loaded(head, variant.layers, described)
