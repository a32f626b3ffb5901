"""Drafters that propose what a trace or a law says, and so stand in the place of real ones."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from math import isclose
from zlib import crc32

import numpy as np

from emssd.attention.trees import depths
from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from emssd_lab.simulate.traces import WRONG, Trace

__all__ = ["TraceDrafter", "TreeDrafter"]

_POSITIONS = 1024  # of each request that have a coin of their own; after them the coins begin again
_MOST_NODES = 4096


class TreeLaw:
    """Trees of one shape (SpecInfer's expansion, Miao et al. 2023, §3), right by chance.

    One coin per output position says which rank is right there, or none. So trees of all shapes, chains included, and
    all budgets see the same text. The chances of a way's nodes are multiplied; nodes are sorted by that product.

    Args:
        branches: children of each node of the first level's origin, of the first level, and so on.
        chances: by depth, from 1: by rank, how likely that child is the right one. The last entry holds for all deeper
            levels, and ranks without one are never right.

    Attributes:
        parents: of the nodes, as in `Draft.parents`.
        worths, chances: of each node the probability that it is right, with all on the way to it; given its parent.
        depths, ranks: of the nodes; a rank is a place among siblings, from 0.

    Raises:
        ConfigError: no branches, or chances that are no probabilities of different events.
    """

    def __init__(self, branches: Seq[int], chances: Seq[Seq[float]], seed: int = 0) -> None:
        if not branches or min(branches) < 1 or sum(accumulate(branches, int.__mul__)) > _MOST_NODES:
            raise ConfigError(
                f"branches are {list(branches)}; give the number of children for each level, 1 or more, and at most "
                f"{_MOST_NODES} nodes in all"
            )
        if not chances or any(min(level, default=0.0) < 0 or sum(level) > 1 + 1e-9 for level in chances):
            raise ConfigError(
                f"chances are {[list(level) for level in chances]}; give for each depth a list of one chance per rank, "
                f"which add up to 1 at most"
            )
        self._chances = [list(level) for level in chances]
        self._bounds = [list(accumulate(level)) for level in chances]
        self._seed = seed
        self._coins: dict[str, list[float]] = {}
        nodes = self._grown(branches)
        order = sorted(range(len(nodes)), key=lambda node: -nodes[node][2])  # equal ones stay, parents before children
        places = {node: place for place, node in enumerate(order)} | {-1: -1}
        self.parents = tuple(places[nodes[node][0]] for node in order)
        self.worths = tuple(nodes[node][2] for node in order)
        self.ranks = tuple(nodes[node][1] for node in order)
        self.depths = depths(self.parents)
        self.chances = tuple(
            worth / above if (above := self.worths[parent] if parent >= 0 else 1.0) else 0.0
            for worth, parent in zip(self.worths, self.parents, strict=True)
        )

    def right(self, request_id: str, position: int) -> list[bool]:
        """For each node of a tree after `position` new tokens, whether it is right if all on the way to it are."""
        if request_id not in self._coins:
            draw = np.random.default_rng([self._seed, crc32(request_id.encode())])
            self._coins[request_id] = draw.random(_POSITIONS).tolist()
        coins, found = self._coins[request_id], list[bool]()
        for depth, rank in zip(self.depths, self.ranks, strict=True):
            bounds = self._bounds[min(depth, len(self._bounds)) - 1]
            low, high = ([0.0, *bounds][rank], bounds[rank]) if rank < len(bounds) else (1.0, 1.0)
            if isclose(high, 1.0):
                high = 1.0
            found.append(low <= coins[(position + depth - 1) % _POSITIONS] < high)
        return found

    def draft(
        self,
        batch: Batch,
        budget: Seq[int],
        upcoming: Callable[[Row, int, int], Seq[int]],
        wrong: Callable[[int, int], int],
        *,
        tells: bool = False,
    ) -> Draft:
        """A tree for each row, cut to its budget, and no deeper than what the row has left to generate.

        Args:
            upcoming: the tokens of a row from a position of its output on; so many of them.
            wrong: another token than this one, for a node of this rank.
            tells: whether nodes come with their chances as confidence.
        """
        trees = []
        for row, limit in zip(batch, budget, strict=True):
            position = len(row.tokens) - len(row.request.prompt_ids)
            tokens, right = upcoming(row, position, max(self.depths)), self.right(row.request_id, position)
            nodes = zip(self.depths, self.ranks, right, self.parents, strict=True)
            tree = [
                (tokens[depth - 1] if is_right else wrong(tokens[depth - 1], rank), parent)
                for depth, rank, is_right, parent in islice(nodes, limit)
            ]
            trees.append(tree)
        draft = Draft.from_trees(trees, [self.chances[: len(tree)] for tree in trees] if tells else None)
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])

    def _grown(self, branches: Seq[int]) -> list[tuple[int, int, float]]:
        """Level by level: parent, rank and probability of each node."""
        nodes, level = list[tuple[int, int, float]](), [(-1, 1.0)]
        for depth, width in enumerate(branches):
            chances = self._chances[min(depth, len(self._chances) - 1)]
            grown = []
            for parent, worth in level:
                for rank in range(width):
                    chance = worth * (chances[rank] if rank < len(chances) else 0.0)
                    grown.append((len(nodes), chance))
                    nodes.append((parent, rank, chance))
            level = grown
        return nodes


class TraceDrafter(Drafter):
    """Drafts as many right tokens as the drafter of that `stage` did, and `WRONG` after them."""

    def __init__(self, trace: Trace, stage: int = 0) -> None:
        self.num_speculative_tokens = trace.num_speculative_tokens[stage]
        self._traces = {request.request_id: request for request in trace}
        self._stage = stage

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(self._chain(row, limit) for row, limit in zip(batch, budget, strict=True))

    def _chain(self, row: Row, limit: int) -> list[int]:
        request, position = self._traces[row.request_id], len(row.tokens) - len(row.request.prompt_ids)
        length, num_right = request.stages[self._stage].within(limit, position)
        return request.tokens(position, num_right) + [WRONG] * (length - num_right)


class TreeDrafter(Drafter):
    """Drafts the trees of a law for requests whose outputs a trace tells; see `TreeLaw.draft`."""

    drafts_trees = True

    def __init__(self, trace: Trace, law: TreeLaw, *, tells: bool = False) -> None:
        self.num_speculative_tokens = len(law.parents)
        self._traces = {request.request_id: request for request in trace}
        self._law, self._tells = law, tells

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return self._law.draft(batch, budget, self._upcoming, lambda token, rank: WRONG, tells=self._tells)

    def _upcoming(self, row: Row, position: int, count: int) -> list[int]:
        return self._traces[row.request_id].tokens(position, count)
