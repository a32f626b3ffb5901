"""Token trees: who descends from whom, and how deep a node is. A tree is the list of its nodes' parents.

A parent is an index within the tree, smaller than that of its child; -1 is the token that the tree grows from.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count
from operator import eq

import torch

__all__ = ["Parents", "depths", "is_chain", "path"]

Parents = Seq[int]
"""The parents of a tree's nodes, as the module says."""


def depths(parents: Parents) -> list[int]:
    """``[n]`` tokens on the path from the tree's origin to each node, itself included: 1 for a child of the origin."""
    counts: list[int] = []
    for parent in parents:
        counts.append(1 if parent < 0 else counts[parent] + 1)
    return counts


def ancestors(parents: Parents) -> torch.Tensor:
    """``[n, n]`` bool: whether node ``j`` is an ancestor of node ``i``, or node ``i`` itself."""
    rows: list[bytearray] = []  # a byte for each node; many small tensors would take twenty times as long
    for node, parent in enumerate(parents):
        row = bytearray(len(parents)) if parent < 0 else bytearray(rows[parent])
        row[node] = True
        rows.append(row)
    if not rows:
        return torch.zeros(0, 0, dtype=torch.bool)
    return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(rows), len(rows))


def is_chain(parents: Parents) -> bool:
    """Whether each node is the child of the one before."""
    return all(map(eq, parents, count(-1)))


def path(parents: Parents, node: int) -> list[int]:
    """The nodes from the tree's origin to `node`, itself included; none for the origin, -1."""
    nodes = list[int]()
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def hidden_nodes(rows: Iterable[tuple[Parents, int, Seq[int]]], num_queries: int, num_slots: int) -> torch.Tensor:
    """The slots that a query must not see, although the tokens in them may stand before it.

    Args:
        rows: ``[B]`` for each row its tree, the number of its new tokens, and the slots of the tree's nodes ``[n]``.
        num_queries: of the longest row.
        num_slots: of the largest row.

    Returns:
        ``[B, num_queries, num_slots]`` bool on the host: true where the query is a node, and the slot holds a node that
        is neither itself nor an ancestor of it.
    """
    rows = list(rows)
    hidden = torch.zeros(len(rows), num_queries, num_slots, dtype=torch.bool)
    for row, (tree, num_new, slots) in zip(hidden, rows, strict=True):
        if tree:
            nodes = ~ancestors(tree)[-num_new:]  # the last nodes are new; earlier ones may be cached
            row[num_new - len(nodes) : num_new, list(slots)] = nodes
    return hidden
