"""A drafter that proposes what a trace says, so that it can stand in the place of the one that was recorded."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.drafting import Draft, Drafter
from emssd.sequences import Batch
from emssd.simulate.traces import WRONG, Trace
from emssd.simulate.tree_law import TreeLaw

__all__ = ["TraceDrafter", "TreeDrafter"]


class TraceDrafter(Drafter):
    """Drafts as many right tokens as the recorded drafter did, and `WRONG` behind them.

    Args:
        trace: of the requests that will come.
        stage: which of its drafters this one is.
    """

    def __init__(self, trace: Trace, stage: int = 0) -> None:
        self.num_speculative_tokens = trace.num_speculative_tokens[stage]
        self._traces = {request.request_id: request for request in trace}
        self._stage = stage

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        tokens, indptr = list[int](), [0]
        for row, limit in zip(batch, budget, strict=True):
            request, position = self._traces[row.request_id], len(row.tokens) - len(row.request.prompt_ids)
            trace = request.stages[self._stage]
            length = min(limit, trace.drafted[position])
            num_right = min(length, trace.right[position])
            tokens += request.tokens(position, num_right) + [WRONG] * (length - num_right)
            indptr.append(len(tokens))
        return Draft(torch.tensor(tokens, dtype=torch.int64), tuple(indptr))


class TreeDrafter(Drafter):
    """Drafts the trees of a law for requests whose outputs a trace tells.

    Args:
        trace: of the requests that will come; what its own drafters have to offer is not asked.
        tells: whether it says how likely its nodes are, as the law has them.
    """

    drafts_trees = True

    def __init__(self, trace: Trace, law: TreeLaw, *, tells: bool = False) -> None:
        self.num_speculative_tokens = len(law.parents)
        self._traces = {request.request_id: request for request in trace}
        self._law, self._tells = law, tells

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        law = self._law
        trees = list[list[tuple[int, int]]]()
        for row, limit in zip(batch, budget, strict=True):
            request, position = self._traces[row.request_id], len(row.tokens) - len(row.request.prompt_ids)
            upcoming = request.tokens(position, max(law.depths))
            right = law.right(row.request_id, position)[:limit]
            trees.append([
                (upcoming[depth - 1] if is_right else WRONG, parent)
                for depth, is_right, parent in zip(law.depths, right, law.parents, strict=False)
            ])  # fmt: skip
        draft = Draft.from_trees(trees, [law.chances[: len(tree)] for tree in trees] if self._tells else None)
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])
