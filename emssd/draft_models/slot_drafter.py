"""`SlotDrafter`: drafts all levels with one pass, as heads do that look several tokens ahead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

import torch

from emssd.attention.packed import on_device
from emssd.draft_models.growing_tree import GrowingRow, GrowingTree, Level
from emssd.draft_models.level_drafter import LevelDrafter
from emssd.draft_models.top_tokens import after, on_host
from emssd.sequences import Row

__all__ = ["SlotDrafter"]


class SlotDrafter(LevelDrafter):
    """Drafts with one pass for all levels: the tokens after a node depend on its level, and not on the tokens before.

    Its logits have a slot for each level of a row. On a GPU the host waits once a draft, or twice in a batch of greedy
    and sampled rows; once more for each level if a row has penalties, which read the tokens drafted before.
    """

    caches_nodes = False

    @abstractmethod
    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """The logits ``[sum(depths), draft_vocab_size]`` of all levels of the rows' trees, row after row."""

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        tree = super().tree_of(row, num_nodes, depth)  # type: ignore[safe-super]  # of a sibling class
        if tree is not None:
            tree.depth = min(tree.depth, 1 + tree.max_cached)
        return tree

    def most_cached(self, num_nodes: int, depth: int) -> int:
        """A mask for each level but the first."""
        return depth - 1

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        self._logits, self._starts, start = self.slots(rows), dict[str, int](), 0
        for row in rows:
            self._starts[row.request_id] = start
            start += row.tree.depth
        if not any(row.node.params.reads_path for row in rows):
            nodes = [after(row.node, depth) for row in rows for depth in range(row.tree.depth)]
            self._known = on_host(self._likely(self._logits, nodes))
            if self._goes_on is None:
                return self._logits  # nobody reads them
        return self.compute([(row, [(-1, ())]) for row in rows])

    def compute(self, level: Level) -> torch.Tensor:
        return self._logits[on_device(self._indices_of(level), self._logits.device)]
