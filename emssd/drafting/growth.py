"""Token trees that grow best first: what drafters have in common that know several continuations of a text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

_State = TypeVar("_State")


class Tree(NamedTuple):
    """The draft of one row; its first nodes, however many, are a tree.

    Attributes:
        token_ids: ``[n]``.
        parents: ``[n]`` for each node the index of its parent, -1 for a child of the row's newest token.
        confidence: ``[n]`` the probability of each node after its parent.
    """

    token_ids: list[int]
    parents: list[int]
    confidence: list[float]


def grow_tree(
    origin: _State,
    children: Callable[[_State], Seq[tuple[int, float, _State]]],
    *,
    num_nodes: int,
    depth: int,
    branches: int,
    least: float = 0.0,
) -> Tree:
    """The tree of the likeliest nodes: the next one is always that with the largest product of probabilities so far.

    SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975, §4.2) grows its trees like this, and the most frequent
    prefixes that REST (He et al. 2023, arXiv 2311.08252, §3.3) selects are the same nodes. Of equally likely nodes the
    one below the node that was taken last comes first, so that a path is finished before the next is begun. The
    likeliest child of each node is taken before its siblings, so the tree holds the chain of likeliest tokens.

    Args:
        origin: what `children` knows the row's newest token by.
        children: token, probability and state of what may follow a state, the likeliest first; the probabilities add up
            to 1 at most.
        num_nodes, depth: of the tree, at most.
        branches: leaves of the tree, at most; 1 gives a chain.
        least: nodes whose product is smaller are left out.
    """
    tree, num_leaves, parents = Tree([], [], []), 1, set[int]()
    waiting: list[tuple[float, int, int, int, int, float, _State]] = []
    num_offered = 0

    def offer(node: int, product: float, level: int, state: _State) -> None:
        nonlocal num_offered
        for token, chance, following in reversed(children(state)[:branches]):
            if product * chance >= least:
                num_offered += 1
                heappush(waiting, (-product * chance, -num_offered, node, level, token, chance, following))

    if depth > 0 and num_nodes > 0:
        offer(-1, 1.0, 1, origin)
    while waiting and len(tree.token_ids) < num_nodes:
        product, _, parent, level, token, chance, state = heappop(waiting)
        if parent in parents:
            if num_leaves == branches:
                continue
            num_leaves += 1
        parents.add(parent)
        tree.token_ids.append(token)
        tree.parents.append(parent)
        tree.confidence.append(chance)
        if level < depth:
            offer(len(tree.token_ids) - 1, -product, level + 1, state)
    return tree
