"""Plugin `drafter=token_recycling`: drafts from what the target thought of at earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from emssd.drafting import Draft, Drafter, Outcome, Tree, grow_tree, joined_trees
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering
from emssd.sequences import Batch

__all__ = ["TokenRecyclingConfig"]


@dataclass
class TokenRecyclingConfig:
    """Options of `drafter=token_recycling` (Luo et al. 2024, "Turning Trash into Treasure", arXiv 2408.08696).

    Attributes:
        num_candidates: how many of the target's best tokens are remembered after each token (8, as published).
        num_nodes: the most tokens drafted for one row in one step. 80 were published, for one row on a GPU.
        depth: the longest way through a draft (6, as published).
    """

    num_candidates: AtLeastOne = 8
    num_nodes: AtLeastOne = 32
    depth: AtLeastOne = 6


def grow(table: Mapping[int, Seq[int]], origin: int, shares: Seq[float], num_nodes: int, depth: int) -> Tree:
    """The `num_nodes` likeliest nodes after the token `origin`, the likeliest first.

    Args:
        shares: by rank, how often the target takes that candidate; none above the one before.
    """

    def following(token: int) -> list[tuple[int, float, int]]:
        return [(best, share, best) for best, share in zip(table.get(token, ()), shares, strict=False)]

    return grow_tree(origin, following, num_nodes=num_nodes, depth=depth, branches=num_nodes)


class TokenRecyclingDrafter(Drafter):
    """Walks over the target's own earlier candidates. The table is shared by all rows, and outlives them.

    It holds, for each token, what the target considered last after it. The authors walk one tree of 80 nodes that they
    found offline; here its shape follows from how often the target took the first, second, … of the candidates so far.
    """

    drafts_trees = True

    def __init__(self, config: TokenRecyclingConfig) -> None:
        self.num_speculative_tokens = config.num_nodes
        self.num_candidates = config.num_candidates
        self._depth = config.depth
        self.reset()

    def reset(self) -> None:
        self._table: dict[int, list[int]] = {}
        self._origins: dict[str, int] = {}  # the newest token of each row, as far as it was shown
        # How often the target took the candidate of each rank. What these begin with weighs as much as a dozen tokens.
        self._taken = [6 * 0.5**rank for rank in range(self.num_candidates)]
        self._seen = 13.0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._origins = {row.request_id: row.tokens[-1] for row in batch}
        shares = self._shares()
        return joined_trees(
            grow(self._table, row.tokens[-1], shares, limit, min(self._depth, row.num_remaining - 1))
            for row, limit in zip(batch, budget, strict=True)
        )

    def observe(self, outcome: Outcome) -> None:
        """Learn the ranks that the target takes, and its candidates after every token of the step."""
        if outcome.candidates is None:
            return
        rows = zip(outcome.batch, outcome.accepted, outcome.target_ids, outcome.candidates, strict=True)
        for number, (row, accepted, targets, candidates) in enumerate(rows):
            if (origin := self._origins.get(row.request_id)) is None:
                continue
            tokens = [origin, *outcome.draft.tokens(number)]
            for node in (-1, *accepted):
                self._count(tokens[node + 1], targets[node + 1])
            self._table.update(zip(tokens, map(list, candidates), strict=True))
        self._origins = {row.request_id: row.tokens[-1] for row in outcome.batch}

    def _count(self, before: int, token: int) -> None:
        """The target chose `token` after the token `before`."""
        if before in self._table:
            self._seen += 1
            if token in self._table[before]:
                self._taken[self._table[before].index(token)] += 1

    def _shares(self) -> list[float]:
        """By rank, how often the target takes that candidate. A rank counts no more than the one before."""
        return list(accumulate((taken / self._seen for taken in self._taken), min))


emssd_drafters = offering(
    DrafterSpec("token_recycling", TokenRecyclingConfig, lambda config, _: TokenRecyclingDrafter(config))
)
