"""A drafter of trees, for docs/tutorial/draft_a_tree.md."""

from collections.abc import Sequence
from itertools import pairwise

from emssd.drafting import Draft, Drafter
from emssd.sequences import Batch


class TwoWays(Drafter):
    """Drafts the two latest tokens that followed the newest one, and a token after the later of them."""

    num_speculative_tokens = 3
    drafts_trees = True

    def propose(self, batch: Batch, budget: Sequence[int]) -> Draft:
        trees = []
        for row, limit in zip(batch, budget, strict=True):
            behind: dict[int, list[int]] = {}
            for token, following in pairwise(row.tokens):
                known = behind.setdefault(token, [])
                known[:] = [following, *(other for other in known if other != following)][:2]
            nodes = [(token, -1) for token in behind.get(row.tokens[-1], [])]
            if nodes:
                nodes += [(token, 0) for token in behind.get(nodes[0][0], [])[:1]]
            trees.append(nodes[:limit])
        return Draft.from_trees(trees).shallow([row.num_remaining - 1 for row in batch])
