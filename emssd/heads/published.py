"""`PublishedShape`: published token trees that are the same in every step, grown level by level."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting.levels import GrowingTree
from emssd.drafting.shapes import Expansion, Shape
from emssd.heads.trees import StaticTree

__all__ = ["PublishedShape"]


class PublishedShape(Shape):
    """A tree of the same ranks in every step (Li et al. 2024, EAGLE, arXiv 2401.15077).

    Where fewer nodes may be drafted, the most probable are.

    Args:
        tree: at least one node.
    """

    def __init__(self, tree: StaticTree) -> None:
        self._ranks = tree.children()
        self.num_nodes, self.depth, self.width = len(tree.parents), max(tree.depths), 1 + max(tree.ranks)

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [(node, ranks) for node in frontier if (ranks := self._ranks.get(tree.way(node)))]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        levels = [len(way) for way in self._ranks]
        return sum(min(levels.count(level), num_nodes - 1) for level in range(1, depth))
