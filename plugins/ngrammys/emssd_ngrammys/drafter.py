"""N-Grammys: n-grams of the context and bigrams of the model, in one token tree.

Stewart et al. 2024, arXiv 2411.03786, §4. There a draft is a batch of chains, and bigrams take the places that context
n-grams leave; here it is a tree, which holds the likeliest nodes of both.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

from emssd.drafting import Draft, NGramDrafter, Outcome
from emssd.errors import ConfigError
from emssd.sequences import Batch
from emssd_ngrammys import NGrammysConfig

__all__ = ["NGrammysDrafter"]


class NGrammysDrafter(NGramDrafter):
    """Drafts trees. The bigrams are shared by all rows, and outlive them.

    Args:
        config: see `NGrammysConfig`.

    Raises:
        ConfigError: an option out of its range.
    """

    def __init__(self, config: NGrammysConfig) -> None:
        for name in ("max_ngram_size", "num_candidates", "num_nodes", "depth"):
            if getattr(config, name) < 1:
                raise ConfigError(f"drafter.{name} is {getattr(config, name)}; it must be at least 1")
        if not 0 <= config.bigram_share <= 1:
            raise ConfigError(f"drafter.bigram_share is {config.bigram_share}; it must be from 0 to 1")
        super().__init__(config.max_ngram_size, 1, config.num_nodes, config.depth, config.num_nodes)
        self.drafts_trees, self.num_candidates, self._share = True, config.num_candidates, config.bigram_share
        self._ranks = [0.5 ** (rank + 1) for rank in range(config.num_candidates)]
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._bigrams: dict[int, tuple[int, ...]] = {}
        self._newest: dict[str, int] = {}  # token of each row of the running step

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._newest = {row.request_id: row.tokens[-1] for row in batch}
        return super().propose(batch, budget)

    def observe(self, outcome: Outcome) -> None:
        """Remember what the target holds likeliest behind every token of the step."""
        super().observe(outcome)
        if outcome.candidates is None:
            return
        ids = outcome.draft.token_ids.tolist()
        rows = zip(outcome.batch, outcome.candidates, pairwise(outcome.draft.indptr), strict=True)
        for row, candidates, (start, stop) in rows:
            tokens = [self._newest[row.request_id], *ids[start:stop]]
            self._bigrams.update(zip(tokens, map(tuple, candidates), strict=True))

    def more(self, token: int, chances: dict[int, float]) -> None:
        """Give the bigrams of `token` their share."""
        share = self._share if chances else 1.0
        for known in chances:
            chances[known] *= 1 - share
        for best, chance in zip(self._bigrams.get(token, ()), self._ranks, strict=False):
            chances[best] = chances.get(best, 0.0) + share * chance
