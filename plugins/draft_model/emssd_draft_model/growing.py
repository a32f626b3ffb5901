"""`GrowingTree`: the token tree of one row while it is drafted, and the way that the target took through it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

__all__ = ["GrowingTree"]


@dataclass(slots=True)
class GrowingTree:
    """Nodes in the order of creation, more of them than are drafted in the end. Node -1 is the row's newest token.

    Args:
        num_tokens: of the row; the tree grows behind them.
        num_nodes: the most nodes that may be drafted.
        depth: how deep the deepest may be.
        max_cached: the most nodes that the draft model may compute, as there is no room for the KV of more.

    Attributes:
        token_ids, parents: of each node.
        log_probs: of each node, how likely the target chooses it behind its parent, as the draft model sees it.
        scores: the sum of these along the way to each node. It never rises from a parent to its child.
        ways: the way to each node: at each level, which of its parent's likeliest tokens it is, counted from 0.
        level: the nodes of the deepest level.
        cached: the nodes whose KV the draft model has, in the order in which it lies there.
        choices: the likeliest tokens behind each node that was computed, and behind node -1.
    """

    num_tokens: int
    num_nodes: int
    depth: int
    max_cached: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ways: list[tuple[int, ...]] = field(default_factory=list)
    level: list[int] = field(default_factory=lambda: [-1])
    cached: list[int] = field(default_factory=list)
    choices: dict[int, list[int]] = field(default_factory=dict)

    def way(self, node: int) -> tuple[int, ...]:
        """`ways` of a node, also of -1, where it is empty."""
        return self.ways[node] if node >= 0 else ()

    def path(self, node: int) -> list[int]:
        """The tokens from the newest one on to `node`, without the former."""
        found = list[int]()
        while node >= 0:
            found.append(self.token_ids[node])
            node = self.parents[node]
        return found[::-1]

    def grow(self, node: int, ranks: Seq[int], tokens: list[int], log_probs: list[float]) -> None:
        """Give `node` children: those of its most probable `tokens` that have the `ranks`."""
        self.choices[node] = tokens
        score, way = (self.scores[node], self.ways[node]) if node >= 0 else (0.0, ())
        for rank in ranks:
            if rank < len(tokens):
                self.level.append(len(self.token_ids))
                self.token_ids.append(tokens[rank])
                self.parents.append(node)
                self.log_probs.append(log_probs[rank])
                self.scores.append(score + log_probs[rank])
                self.ways.append((*way, rank))

    def best(self) -> list[int]:
        """The nodes to draft, the most probable first; of equal ones the first that was created."""
        return sorted(range(len(self.scores)), key=lambda node: (-self.scores[node], node))[: self.num_nodes]

    def frontier(self) -> list[int]:
        """The nodes of the deepest level that may have children, the most probable first.

        A node that is not among the best by now never will be. The children of the last of them will not be either, as
        none is more probable than its parent. So nothing is computed for those.
        """
        level = set(self.level)
        return [
            node for node in self.best()[: self.num_nodes - 1] if node in level and len(self.ways[node]) < self.depth
        ]

    def cached_parents(self) -> list[int]:
        """The parents of the nodes in the cache, as indices among them."""
        places = {node: place for place, node in enumerate(self.cached)} | {-1: -1}
        return [places[self.parents[node]] for node in self.cached]

    def follow(self, tokens: Seq[int]) -> list[int]:
        """The nodes that follow each other as `tokens` do, from the newest token on, as far as there are any."""
        found, node = list[int](), -1
        children = {
            (parent, token): i for i, (parent, token) in enumerate(zip(self.parents, self.token_ids, strict=True))
        }
        for token in tokens:
            if (node := children.get((node, token), -1)) < 0:
                break
            found.append(node)
        return found
