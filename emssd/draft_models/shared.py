"""`SharedDrafter`: a rounded copy of the target drafts on the target's own KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.decoding.packing import pack
from emssd.draft_models.growing_tree import GrowingTree
from emssd.draft_models.level_drafter import GrowingRow, Level, LevelDrafter, pack_chain, pack_level
from emssd.draft_models.shapes import Shape
from emssd.drafting import Draft
from emssd.model import RoundedRunner
from emssd.sequences import Row

__all__ = ["SharedDrafter"]


class SharedDrafter(LevelDrafter):
    """Drafts for rows whose prompt the target has computed. Verification overwrites the KV of its nodes.

    Args:
        runner: the rounded copy.
        vocab_size: the target's.
        shape: of the trees; one child for each node makes chains.
    """

    def __init__(self, runner: RoundedRunner, vocab_size: int, shape: Shape) -> None:
        super().__init__(shape, vocab_size, None)
        self._runner = runner

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        reach = self._runner.max_model_len - len(row.tokens)
        if row.num_uncached != 1 or reach <= 0 or not self._runner.is_attached:
            return None
        # The scheduler has made sure that `num_nodes` more tokens fit.
        most = min(self.shape.most_cached(num_nodes, depth), num_nodes, reach)
        return GrowingTree(len(row.tokens), num_nodes, min(depth, reach), most)

    def _num_cached(self, row: Row) -> int:
        return row.num_cached

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """Compute the newest token of each row, as verification will again."""
        return self._runner.run(pack(rows, Draft.empty(len(rows)))).logits[:, : self._vocab_size]

    def compute(self, level: Level) -> torch.Tensor:
        return self._runner.run(pack_level(level)).logits[:, : self._vocab_size]

    def follow(self, rows: Seq[GrowingRow], tokens: torch.Tensor, depth: int) -> torch.Tensor:
        return self._runner.run(pack_chain(rows, tokens, depth)).logits[:, : self._vocab_size]
