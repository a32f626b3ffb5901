"""Trees in masks by position: a node must not see those nodes that its position allows and that are no ancestors."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from emssd.attention.trees import Parents, ancestors

__all__ = ["hidden_nodes"]


def hidden_nodes(rows: Iterable[tuple[Parents, int, Seq[int]]], num_queries: int, num_slots: int) -> torch.Tensor:
    """Which slots a query must not see, although the tokens in them may stand before it.

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
    for place, (tree, num_new, slots) in enumerate(rows):
        if tree:
            nodes = ~ancestors(tree)[-num_new:]  # the last nodes are new; earlier ones may be cached
            queries = hidden[place, num_new - len(nodes) : num_new]
            queries[:, list(slots)] = nodes
    return hidden
