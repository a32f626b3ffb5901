"""A drafter that proposes what a trace says, so that it can stand in the place of the one that was recorded."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.drafting import Draft, Drafter
from emssd.sequences import Batch
from emssd.simulate.traces import RIGHT, WRONG, Trace

__all__ = ["TraceDrafter"]


class TraceDrafter(Drafter):
    """Drafts `RIGHT` as often as the recorded drafter was right, and `WRONG` behind it.

    Args:
        trace: of the requests that will come.
        stage: which of its drafters this one is.
    """

    def __init__(self, trace: Trace, stage: int = 0) -> None:
        self.num_speculative_tokens = trace.num_speculative_tokens[stage]
        self._traces = {request.request_id: request.stages[stage] for request in trace}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        tokens, indptr = list[int](), [0]
        for row, limit in zip(batch, budget, strict=True):
            trace, position = self._traces[row.request_id], len(row.tokens) - len(row.request.prompt_ids)
            length = min(limit, trace.drafted[position])
            num_right = min(length, trace.right[position])
            tokens += [RIGHT] * num_right + [WRONG] * (length - num_right)
            indptr.append(len(tokens))
        return Draft(torch.tensor(tokens, dtype=torch.int64), tuple(indptr))
