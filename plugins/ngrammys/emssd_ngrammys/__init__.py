"""Plugin `drafter=ngrammys`: a tree of the text's own n-grams and of the target's own bigrams."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.drafting import Draft, NGramDrafter, Outcome
from emssd.errors.ranges import AtLeastOne, Share
from emssd.hooks import DrafterSpec, offering
from emssd.sequences import Batch

__all__ = ["NGrammysConfig"]


@dataclass
class NGrammysConfig:
    """Options of `drafter=ngrammys` (Stewart et al. 2024, "The N-Grammys", arXiv 2411.03786).

    The bigrams are the tokens that the target held likeliest when it last computed a token. The authors compute them
    for the whole vocabulary beforehand, each token by itself.

    Attributes:
        max_ngram_size: tokens of the longest n-gram that is looked for in the row's own text.
        num_candidates: the bigrams that are remembered of each token.
        num_nodes: the most tokens drafted for one row in one step.
        depth: the longest way through a draft.
        bigram_share: how much of the probability of what comes next the bigrams have where the text has something to
            say; all of it where the text has nothing.
    """

    max_ngram_size: AtLeastOne = 4
    num_candidates: AtLeastOne = 4
    num_nodes: AtLeastOne = 16
    depth: AtLeastOne = 8
    bigram_share: Share = 0.3


class NGrammysDrafter(NGramDrafter):
    """Drafts trees of both. The bigrams are shared by all rows, and outlive them.

    In §4 of the paper, a draft is a batch of chains, and bigrams take the places that n-grams of the context leave.
    """

    def __init__(self, config: NGrammysConfig) -> None:
        super().__init__(config.max_ngram_size, 1, config.num_nodes, config.depth, config.num_nodes)
        self.drafts_trees, self.num_candidates, self._share = True, config.num_candidates, config.bigram_share
        self._ranks = [0.5 ** (rank + 1) for rank in range(config.num_candidates)]
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._bigrams: dict[int, tuple[int, ...]] = {}
        self._newest: dict[str, int] = {}  # token of each row, as far as it was shown

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._newest = {row.request_id: row.tokens[-1] for row in batch}
        return super().propose(batch, budget)

    def observe(self, outcome: Outcome) -> None:
        """Remember what the target holds likeliest after every token of the step."""
        super().observe(outcome)
        if outcome.candidates is None:
            return
        for number, (row, candidates) in enumerate(zip(outcome.batch, outcome.candidates, strict=True)):
            if (newest := self._newest.get(row.request_id)) is not None:
                tokens = [newest, *outcome.draft.tokens(number)]
                self._bigrams.update(zip(tokens, map(tuple, candidates), strict=True))
        self._newest = {row.request_id: row.tokens[-1] for row in outcome.batch}

    def more(self, token: int, chances: dict[int, float]) -> None:
        """Give the bigrams of `token` their share."""
        share = self._share if chances else 1.0
        for counted in chances:
            chances[counted] *= 1 - share
        for best, chance in zip(self._bigrams.get(token, ()), self._ranks, strict=False):
            chances[best] = chances.get(best, 0.0) + share * chance


emssd_drafters = offering(DrafterSpec("ngrammys", NGrammysConfig, lambda config, _: NGrammysDrafter(config)))
