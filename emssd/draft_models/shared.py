"""`SharedDrafter`: a rounded copy of the target drafts on the target's own KV cache."""

from __future__ import annotations

from emssd.draft_models.growing_tree import GrowingTree
from emssd.draft_models.models import RunnerDrafter
from emssd.model import RoundedRunner
from emssd.sequences import Row

__all__ = ["SharedDrafter"]


class SharedDrafter(RunnerDrafter):
    """Drafts for rows whose prompt the target has computed.

    The first pass computes their newest tokens, as verification will again. That overwrites the KV of its nodes.

    Args:
        runner: the rounded copy.
        vocab_size: the target's.
        shape: of the trees; one child for each node makes chains.
    """

    _runner: RoundedRunner

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        reach = self._runner.max_model_len - len(row.tokens)
        if row.num_uncached != 1 or reach <= 0 or not self._runner.is_attached:
            return None
        # The scheduler has made sure that `num_nodes` more tokens fit.
        most = min(self.shape.most_cached(num_nodes, depth), num_nodes, reach)
        return GrowingTree(len(row.tokens), num_nodes, min(depth, reach), most)

    def _num_cached(self, row: Row) -> int:
        return row.num_cached
