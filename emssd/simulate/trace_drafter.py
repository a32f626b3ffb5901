"""A drafter that proposes what a trace says, so that it can stand in the place of the one that was recorded."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.drafting import Draft, Drafter
from emssd.sequences import Batch
from emssd.simulate.traces import WRONG, Trace

__all__ = ["TraceDrafter"]


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
