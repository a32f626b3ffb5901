"""Drafts chains with a smaller model for the whole batch at once, through a runner like the target's.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; batched as in the EMS-SD paper,
§4.3. Sampled with the noise of the target, as in Daliri et al. 2024, arXiv 2408.07978, §4.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from emssd.attention import on_device
from emssd.draft_models import DynamicShape, ModelDrafter
from emssd.drafting import Draft
from emssd.model import ModelRunner
from emssd.sequences import Batch

__all__ = ["DraftModelDrafter"]


class DraftModelDrafter(ModelDrafter):
    """Drafts chains: at each node the token that the draft model would choose if it were the target.

    The drafted ids stay on the device, so that the host waits for none of the passes, and a chain has no confidence.
    The host reads them, pass by pass, in a batch with penalties or grammars, and where a budget policy ends drafts
    between passes. The policy is then told the confidence.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, num_speculative_tokens: int) -> None:
        super().__init__(runner, vocab_size, DynamicShape(num_speculative_tokens, num_speculative_tokens, 1))

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if self._goes_on is not None:
            return super().propose(batch, budget)
        rows = self._begin(batch, budget)
        if not rows:
            return Draft.empty(len(batch))
        if not self._runs_chain(rows):
            return replace(self._draft(batch, rows), confidence=None)
        wanted = [row.tree.depth for row in rows]
        tokens = self.run_chain(rows, self.catch_up(rows), wanted)[0].long().clamp_(min=0)
        self.finish(rows)
        lengths, indptr = {row.request_id: row.tree.depth for row in rows}, [0]
        for row in batch:
            indptr.append(indptr[-1] + lengths.get(row.request_id, 0))
        flat, (width, num_rows) = tokens.T.flatten(), tokens.shape
        if indptr[-1] < len(flat):
            index = [row * width + column for row in range(num_rows) for column in range(wanted[row])]
            flat = flat[on_device(index, flat.device)]
        return Draft(flat, tuple(indptr))
