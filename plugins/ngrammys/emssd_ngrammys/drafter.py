"""N-Grammys: n-grams of the context and bigrams of the model, in one token tree.

Stewart et al. 2024, arXiv 2411.03786, §4. There a draft is a batch of chains, and bigrams take the places that context
n-grams leave; here it is a tree, which holds the likeliest nodes of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import pairwise

from emssd.drafting import Draft, Drafter, NGramCounts, Outcome, Tree, grow_tree, joined_trees
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from emssd_ngrammys import NGrammysConfig

__all__ = ["NGrammysDrafter"]

_State = tuple[int, ...]
"""The latest tokens, as many as the longest n-gram has."""


class NGrammysDrafter(Drafter):
    """Drafts trees. The bigrams are shared by all rows, and outlive them.

    Args:
        config: see `NGrammysConfig`.

    Raises:
        ConfigError: an option out of its range.
    """

    drafts_trees = True

    def __init__(self, config: NGrammysConfig) -> None:
        for name in ("max_ngram_size", "num_candidates", "num_nodes", "depth"):
            if getattr(config, name) < 1:
                raise ConfigError(f"drafter.{name} is {getattr(config, name)}; it must be at least 1")
        if not 0 <= config.bigram_share <= 1:
            raise ConfigError(f"drafter.bigram_share is {config.bigram_share}; it must be from 0 to 1")
        self.num_speculative_tokens, self.num_candidates = config.num_nodes, config.num_candidates
        self._config, self._counts = config, dict[str, NGramCounts]()
        self._ranks = [0.5 ** (rank + 1) for rank in range(config.num_candidates)]
        self.reset()

    def reset(self) -> None:
        self._bigrams: dict[int, tuple[int, ...]] = {}
        self._newest: dict[str, int] = {}  # token of each row of the running step

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._newest = {row.request_id: row.tokens[-1] for row in batch}
        return joined_trees(self._tree(row, limit) for row, limit in zip(batch, budget, strict=True))

    def observe(self, outcome: Outcome) -> None:
        """Remember what the target holds likeliest behind every token of the step."""
        if outcome.candidates is None:
            return
        ids = outcome.draft.token_ids.tolist()
        rows = zip(outcome.batch, outcome.candidates, pairwise(outcome.draft.indptr), strict=True)
        for row, candidates, (start, stop) in rows:
            tokens = [self._newest[row.request_id], *ids[start:stop]]
            self._bigrams.update(zip(tokens, map(tuple, candidates), strict=True))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._counts.pop(request_id, None)

    def _tree(self, row: Row, budget: int) -> Tree:
        config = self._config
        depth = min(config.depth, row.num_remaining - 1)
        if min(budget, depth) < 1:
            return Tree([], [], [])
        if (counts := self._counts.get(row.request_id)) is None:
            counts = self._counts[row.request_id] = NGramCounts(config.max_ngram_size)
        counts.extend(row.tokens)

        def following(state: _State) -> list[tuple[int, float, _State]]:
            found = counts.after(state)
            share, total = (config.bigram_share if found else 1.0), sum(found.values())
            chances = {token: (1 - share) * found[token] / total for token in reversed(found)}
            for token, chance in zip(self._bigrams.get(state[-1], ()), self._ranks, strict=False):
                chances[token] = chances.get(token, 0.0) + share * chance
            ranked = sorted(chances.items(), key=lambda each: -each[1])
            return [(token, chance, (*state, token)[-config.max_ngram_size :]) for token, chance in ranked]

        newest = tuple(row.tokens[-config.max_ngram_size :])
        nodes = min(budget, config.num_nodes)
        return grow_tree(newest, following, num_nodes=nodes, depth=depth, branches=nodes)
