"""Drafters that propose what a trace or a law says, and so stand in the place of real ones."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from math import isclose
from zlib import crc32

import numpy as np

from emssd.attention.trees import depths
from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from emssd_lab.simulate.traces import WRONG, StageTrace, Trace

__all__ = ["TraceDrafter", "TreeLaw"]

_POSITIONS = 1024  # of each request that have a coin of their own; after them the coins begin again
_MOST_NODES = 4096


class TreeLaw:
    """Trees of one shape (SpecInfer's expansion, Miao et al. 2023, §3), right by chance.

    One coin per output position says which rank is right there, or none. So trees of all shapes, chains included, and
    all budgets see the same text. The chances along a path are multiplied; nodes are sorted by that product.

    Args:
        branches: children of each node of the first level's origin, of the first level, and so on.
        chances: by depth, from 1: by rank, how likely that child is the right one. The last entry holds for all deeper
            levels, and ranks without one are never right.

    Attributes:
        parents: of the nodes, as in `Draft.parents`.
        worths, chances: the probability of each node to be right, with its whole path; given its parent.
        depths, ranks: of the nodes; a rank counts siblings, from 0.

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
        self._bounds = [list(accumulate(level)) for level in chances]
        self._seed = seed
        self._coins: dict[str, list[float]] = {}
        nodes, level = list[tuple[int, int, float]](), [(-1, 1.0)]  # parent, rank and probability; node and probability
        for depth, width in enumerate(branches):
            by_rank = [*chances[min(depth, len(chances) - 1)], *[0.0] * width]
            grown = [(parent, rank, worth * by_rank[rank]) for parent, worth in level for rank in range(width)]
            level = [(node, worth) for node, (_, _, worth) in enumerate(grown, len(nodes))]
            nodes += grown
        order = sorted(range(len(nodes)), key=lambda node: -nodes[node][2])  # stable: parents before children
        ranked = {node: number for number, node in enumerate(order)} | {-1: -1}
        self.parents = tuple(ranked[nodes[node][0]] for node in order)
        self.worths = tuple(nodes[node][2] for node in order)
        self.ranks = tuple(nodes[node][1] for node in order)
        self.depths = depths(self.parents)
        self.chances = tuple(
            worth / above if (above := self.worths[parent] if parent >= 0 else 1.0) else 0.0
            for worth, parent in zip(self.worths, self.parents, strict=True)
        )

    def right(self, request_id: str, position: int) -> list[bool]:
        """For each node of a tree after `position` new tokens, whether it is right if its path is."""
        if request_id not in self._coins:
            draw = np.random.default_rng([self._seed, crc32(request_id.encode())])
            self._coins[request_id] = draw.random(_POSITIONS).tolist()
        coins, right = self._coins[request_id], list[bool]()
        for depth, rank in zip(self.depths, self.ranks, strict=True):
            bounds = [0.0, *self._bounds[min(depth, len(self._bounds)) - 1]]
            low, high = bounds[rank : rank + 2] if rank + 1 < len(bounds) else (1.0, 1.0)
            right.append(low <= coins[(position + depth - 1) % _POSITIONS] < (1.0 if isclose(high, 1.0) else high))
        return right


class TraceDrafter(Drafter):
    """Drafts as many right tokens as the drafter of that `stage` did, then a wrong one; or the trees of a law.

    Args:
        tells: trees come with the chances of their nodes as confidence.
    """

    def __init__(self, trace: Trace, stage: int = 0, *, law: TreeLaw | None = None, tells: bool = False) -> None:
        self.num_speculative_tokens = trace.num_speculative_tokens[stage] if law is None else len(law.parents)
        self.drafts_trees = law is not None
        self._traces = {request.request_id: request for request in trace}
        self._index, self._law, self._tells = stage, law, tells

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows, law = zip(batch, budget, strict=True), self._law
        if law is None:
            return Draft.from_chains(self._chain(row, limit) if limit else [] for row, limit in rows)
        trees = [self._tree(law, row, limit) for row, limit in rows]
        draft = Draft.from_trees(trees, [law.chances[: len(tree)] for tree in trees] if self._tells else None)
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])

    def _chain(self, row: Row, limit: int) -> list[int]:
        stage, position = self._stage(row.request_id), len(row.output_ids)
        index = position % len(stage.drafted)
        length, right = min(limit, stage.drafted[index]), stage.right[index]
        tokens = self._upcoming(row, position, length)
        if length > right:  # the first wrong token; no later one can be accepted
            tokens[right] = self._wrong(tokens[right], 0)
        return tokens

    def _tree(self, law: TreeLaw, row: Row, limit: int) -> list[tuple[int, int]]:
        """Token and parent of the first nodes."""
        position = len(row.output_ids)
        tokens, right = self._upcoming(row, position, max(law.depths)), law.right(row.request_id, position)
        nodes = zip(law.depths, law.ranks, right, law.parents, strict=True)
        return [
            (tokens[depth - 1] if is_right else self._wrong(tokens[depth - 1], rank), parent)
            for depth, rank, is_right, parent in islice(nodes, limit)
        ]

    def _stage(self, request_id: str) -> StageTrace:
        return self._traces[request_id].stages[self._index]

    def _upcoming(self, row: Row, position: int, count: int) -> list[int]:
        """The next `count` tokens of the target."""
        return self._traces[row.request_id].tokens(position, count)

    def _wrong(self, token: int, rank: int) -> int:
        """Another token than the right one, for a node of this rank."""
        return WRONG
