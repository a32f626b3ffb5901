"""Token trees: who descends from whom, and how deep a node is. A tree is the list of its nodes' parents.

A parent is an index within the tree, smaller than that of its child; -1 is the token that the tree grows from.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

__all__ = ["Parents", "ancestors", "depths", "is_chain"]

Parents = Seq[int]


def depths(parents: Parents) -> list[int]:
    """``[n]`` tokens on the way from the tree's origin to each node, itself included: 1 for a child of the origin."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def ancestors(parents: Parents) -> torch.Tensor:
    """``[n, n]`` bool: whether node ``j`` is an ancestor of node ``i``, or node ``i`` itself."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[node] |= found[parent]
    return found


def is_chain(parents: Parents) -> bool:
    """Whether each node is the child of the one before."""
    return all(parent == node - 1 for node, parent in enumerate(parents))
