"""`GrowingTree`: the token tree of one row while a model drafts it level by level, and `joined_best`, their draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from emssd.attention.transfer import to_host
from emssd.drafting.budget import DraftedNode, GoesOn
from emssd.drafting.draft import Draft

__all__ = ["GrowingTree", "going_on", "joined_best", "with_room"]


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


def joined_best(trees: Seq[GrowingTree | None], *, chains: bool = False) -> Draft:
    """A draft of the best nodes of each row, the most probable first; of nothing for rows without a tree."""
    token_ids, parents, confidence, indptr = list[int](), list[int](), list[float](), [0]
    for tree in trees:
        best = [] if tree is None else tree.best()
        if tree is not None:
            places = {node: place for place, node in enumerate(best)} | {-1: -1}
            token_ids.extend(tree.token_ids[node] for node in best)
            parents.extend(places[tree.parents[node]] for node in best)
            confidence.extend(math.exp(tree.log_probs[node]) for node in best)
        indptr.append(indptr[-1] + len(best))
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    return Draft(tokens, tuple(indptr), None if chains else tuple(parents), tuple(confidence))


def going_on(
    goes_on: GoesOn | None,
    level: Iterable[tuple[str, GrowingTree, Iterable[tuple[int, object]]]],
    logits: torch.Tensor,
    temperature: float,
) -> Container[str]:
    """Which rows of a level that has just grown are drafted further: all, or those for which `goes_on` says so.

    Args:
        goes_on: see `emssd.drafting.Drafter.end_by`.
        level: request id, tree and expansions of each row.
        logits: ``[n, vocab]`` behind the expanded nodes, divided by `temperature`. A GPU's host waits for entropies.
    """
    if goes_on is None:
        return {name for name, *_ in level}
    entropies = torch.special.entr((logits.double() / temperature).softmax(dim=-1)).sum(dim=-1)
    left, newest = iter(to_host(entropies.nan_to_num(math.log(logits.shape[1])))), dict[str, list[DraftedNode]]()
    for name, tree, expansions in level:
        behind = {node: next(left) for node, _ in expansions}
        pairs = [(node, behind[tree.parents[node]]) for node in tree.level]
        newest[name] = [
            DraftedNode(math.exp(tree.log_probs[node]), math.exp(tree.scores[node]), entropy) for node, entropy in pairs
        ]
    return goes_on(newest)


def with_room(
    fits: Callable[[Mapping[str, int]], bool], held: Mapping[str, int], wanted: Seq[tuple[str, int]]
) -> list[bool]:
    """Which rows a KV cache has room for, beside those that it holds already; the first come first.

    Args:
        fits: of the cache, see `emssd.attention.AttentionBackend`.
        held: by request id, how many tokens it holds now.
        wanted: request id of each row, and at how many tokens it is to be; rows of 0 tokens are left out.
    """
    lengths = {name: kv_len for name, kv_len in wanted if kv_len}
    if fits({**held, **lengths}):
        return [kv_len > 0 for _, kv_len in wanted]
    taken, fitting = dict(held), []
    for name, kv_len in wanted:
        more = {name: kv_len} if kv_len else {}
        has_room = bool(more) and fits(taken | more)
        taken |= more if has_room else {}
        fitting.append(has_room)
    return fitting
