"""Static token trees: which of its parent's choices each node is, the same in every step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib.resources import files

from emssd.drafting.levels import GrowingTree
from emssd.drafting.shapes import Expansion, Shape

__all__ = ["PublishedShape", "StaticTree", "Way", "read_trees", "tree_of"]

Way = tuple[int, ...]
"""The way to a node: at each level, which choice of its parent is taken, counted from 0."""

StaticTree = tuple[Way, ...]
"""A token tree of a fixed shape, a parent before its children."""


def tree_of(paths: Iterable[Seq[int]]) -> StaticTree:
    """A tree from published paths: ``[a, b]`` is the `b`-th best child of the `a`-th best child of the root.

    Raises:
        ValueError: a path comes before its parent, or twice.
    """
    ways: dict[Way, None] = {(): None}
    for way in map(tuple, paths):
        if way in ways or way[:-1] not in ways:
            raise ValueError(f"path {list(way)} comes twice, or before its parent")
        ways[way] = None
    return tuple(ways)[1:]


def read_trees(package: str) -> Mapping[str, StaticTree]:
    """The trees that lie as data in a plugin's package, by name."""
    paths = json.loads((files(package) / "trees.json").read_text(encoding="utf-8"))
    return {tree: tree_of(each) for tree, each in paths.items()}


class PublishedShape(Shape):
    """A tree of the same ranks in every step (Li et al. 2024, EAGLE, arXiv 2401.15077).

    Where fewer nodes may be drafted, the most probable are.

    Args:
        tree: at least one node.
    """

    def __init__(self, tree: StaticTree) -> None:
        self._ranks: dict[Way, list[int]] = {}
        for *way, rank in sorted(tree):
            self._ranks.setdefault(tuple(way), []).append(rank)
        self.num_nodes, self.depth, self.width = len(tree), max(map(len, tree)), 1 + max(map(max, tree))

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [(node, ranks) for node in frontier if (ranks := self._ranks.get(tree.way(node)))]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        levels = [len(way) for way in self._ranks]
        return sum(min(levels.count(level), num_nodes - 1) for level in range(1, depth))
