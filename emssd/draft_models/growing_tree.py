"""`GrowingTree`: the token tree of one row while it is drafted level by level; `Level`: what one pass expands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from emssd.attention import PackedInputs
from emssd.decoding.packing import pack_nodes
from emssd.drafting.growth import Tree
from emssd.sampling.choice import Node

__all__ = ["Child", "Expansion", "GrowingRow", "GrowingTree", "Level", "nodes_of", "pack_chain", "pack_level"]

Expansion = tuple[int, Seq[int]]
"""A node to expand, and which of its likeliest tokens become its children, counted from 0."""

Child = tuple[int, int, int, float]
"""A new node: its parent, its rank among the likeliest tokens there, its token, and its `GrowingTree.log_probs`."""


@dataclass(slots=True)
class GrowingTree:
    """Nodes in the order of creation, more of them than are drafted in the end. Node -1 is the row's newest token.

    Args:
        num_tokens: that the drafter's KV cache holds before the tree.
        num_nodes: the most nodes that may be drafted.
        depth: how deep the deepest may be.
        max_cached: the most nodes that the cache has room for.

    Attributes:
        token_ids, parents: of each node.
        ranks: of each node, which of its parent's likeliest tokens it is, counted from 0.
        log_probs: of each node, how likely the target chooses it after its parent, as the drafter sees it.
        scores: the sum of these from the newest token to each node. It never rises from a parent to its child.
        num_levels: that have been created.
        cached, cached_parents: the nodes in the cache, in its order; the parent of each as an index among them.
        places: the index of each cached node among them; -1 for node -1.
        choices: the likeliest tokens after each node that was expanded.
    """

    num_tokens: int
    num_nodes: int
    depth: int
    max_cached: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    num_levels: int = 0
    cached: list[int] = field(default_factory=list)
    cached_parents: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=lambda: {-1: -1})
    choices: dict[int, list[int]] = field(default_factory=dict)
    _level_start: int = -1
    _best: list[tuple[float, int]] = field(default_factory=list)

    @property
    def level(self) -> range:
        """The nodes of the deepest level, in the beginning -1 alone."""
        return range(self._level_start, len(self.token_ids))

    def path(self, node: int) -> list[int]:
        """The tokens after the newest one up to `node`."""
        return self._upwards(node, self.token_ids)

    def path_ranks(self, node: int) -> tuple[int, ...]:
        """The ranks of the nodes on the path to `node`; of -1 none."""
        return tuple(self._upwards(node, self.ranks))

    def add_level(self, children: Seq[Child]) -> None:
        """Create the next level."""
        self._level_start = start = len(self.token_ids)
        self.num_levels += 1
        if not children:
            return
        parents, ranks, token_ids, log_probs = zip(*children, strict=True)
        scores, before = log_probs, self.scores
        if parents[0] >= 0:
            scores = tuple([before[parent] + log_prob for parent, log_prob in zip(parents, log_probs, strict=True)])
        self.parents.extend(parents)
        self.ranks.extend(ranks)
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs)
        self.scores.extend(scores)
        self._best += [(-score, node) for node, score in enumerate(scores, start)]
        self._best.sort()
        del self._best[self.num_nodes :]  # what is not among the best by now never will be

    def frontier(self) -> list[int]:
        """The nodes of the deepest level that may have children, the most probable first.

        No child is more probable than its parent. So a node that is not among the best gets none, and the last of the
        best none either.
        """
        if self.num_levels >= self.depth:
            return []
        return [node for _, node in self._best[: self.num_nodes - 1] if node >= self._level_start]

    def cache(self, nodes: Iterable[int]) -> None:
        """The cache holds these nodes, too, after those before. Parents come first."""
        for node in nodes:
            self.cached_parents.append(self.places[self.parents[node]])
            self.places[node] = len(self.cached)
            self.cached.append(node)

    def follow(self, tokens: Seq[int]) -> list[int]:
        """The nodes that follow each other as `tokens` do, from the newest token on, as far as there are any."""
        children = {edge: node for node, edge in enumerate(zip(self.parents, self.token_ids, strict=True))}
        nodes, node = list[int](), -1
        for token in tokens:
            if (node := children.get((node, token), -1)) < 0:
                break
            nodes.append(node)
        return nodes

    def drafted(self) -> Tree:
        """The best nodes, the most probable first, as a draft."""
        best = [node for _, node in self._best]
        ranks = {node: rank for rank, node in enumerate(best)} | {-1: -1}
        return Tree(
            [self.token_ids[node] for node in best],
            [ranks[self.parents[node]] for node in best],
            [math.exp(self.log_probs[node]) for node in best],
        )

    def _upwards(self, node: int, values: Seq[int]) -> list[int]:
        on_path = list[int]()
        while node >= 0:
            on_path.append(values[node])
            node = self.parents[node]
        return on_path[::-1]


@dataclass(frozen=True, slots=True)
class GrowingRow:
    """A row that is drafted for.

    Attributes:
        tokens: ``[n]``.
        node: where the target chooses the token after the newest one.
        tree: that grows after the newest token.
        num_cached: tokens that the drafter's KV cache holds.
    """

    request_id: str
    tokens: Seq[int]
    node: Node
    tree: GrowingTree
    num_cached: int = 0


Level = list[tuple[GrowingRow, list[Expansion]]]
"""The nodes that one pass expands, of each row. All nodes of a row are equally deep."""


def nodes_of(level: Level) -> list[tuple[GrowingRow, int]]:
    """The nodes of a level, in the order in which they are computed."""
    return [(row, node) for row, expansions in level for node, _ in expansions]


def pack_level(level: Level) -> PackedInputs:
    """The step that computes the nodes of a level."""
    return pack_nodes(
        [row.request_id for row, _ in level],
        torch.tensor([row.tree.token_ids[node] for row, node in nodes_of(level)]),
        [len(expansions) for _, expansions in level],
        [row.tree.num_tokens + len(row.tree.cached) for row, _ in level],
        [row.tree.cached_parents for row, _ in level],
    )


def pack_chain(rows: Seq[GrowingRow], tokens: torch.Tensor, depth: int) -> PackedInputs:
    """The step that computes the newest ``tokens [r]`` of chains of `depth` tokens."""
    kv_lens = [row.tree.num_tokens + depth for row in rows]
    return pack_nodes([row.request_id for row in rows], tokens, [1] * len(rows), kv_lens)
