"""`ForcedTokens`: where a grammar leaves no choice, the tokens that must follow are drafted, at no cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting.draft import Draft
from emssd.drafting.drafter import Drafter
from emssd.sequences import Batch

__all__ = ["ForcedTokens"]


class ForcedTokens(Drafter):
    """Drafts what the grammar of a row forces, and nothing for other rows: the stages after it draft for these."""

    num_speculative_tokens = 16

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = zip(batch, budget, strict=True)
        return Draft.from_chains([[] if row.grammar is None else row.grammar.forced(limit) for row, limit in rows])
