"""Static token trees: who descends from whom, and by which of its parent's choices, the same in every step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.resources import files

from emssd.attention.trees import depths
from emssd.drafting.levels import GrowingTree
from emssd.drafting.shapes import Expansion, Shape

__all__ = ["PublishedShape", "StaticTree", "Way", "read_trees"]

Way = tuple[int, ...]
"""How a node is reached: at each level, which choice of its parent is taken, counted from 0."""


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A token tree of a fixed shape.

    Attributes:
        parents: ``[n]``, see `emssd.attention.trees`; the nodes are in the order of the published list.
        ranks: ``[n]`` which choice of its parent a node is, counted from 0.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of_paths(cls, paths: Iterable[Seq[int]]) -> StaticTree:
        """A tree from published paths: ``[a, b]`` is the `b`-th best child of the `a`-th best child of the root.

        Raises:
            ValueError: a path comes before its parent, or twice.
        """
        places: dict[Way, int] = {(): -1}
        parents, ranks = [], []
        for place, path in enumerate(map(tuple, paths)):
            if path in places or path[:-1] not in places:
                raise ValueError(f"path {list(path)} comes twice, or before its parent")
            parents.append(places[path[:-1]])
            ranks.append(path[-1])
            places[path] = place
        return cls(tuple(parents), tuple(ranks))

    @property
    def depths(self) -> list[int]:
        """``[n]`` levels of the nodes, 1 for a child of the root."""
        return depths(self.parents)

    def shallow(self, depth: int) -> StaticTree:
        """The nodes that are no deeper than `depth`, which is at least 1."""
        return StaticTree.of_paths(way for way in self._ways() if len(way) <= depth)

    def children(self) -> dict[Way, tuple[int, ...]]:
        """The choices of a node that are its children, the first choice first, by the way to it; ``()`` is the root."""
        found: dict[Way, list[int]] = {}
        for *way, rank in self._ways():
            found.setdefault(tuple(way), []).append(rank)
        return {way: tuple(sorted(ranks)) for way, ranks in found.items()}

    def _ways(self) -> list[Way]:
        ways = list[Way]()
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            ways.append((*(ways[parent] if parent >= 0 else ()), rank))
        return ways


def read_trees(package: str, name: str = "trees.json") -> Mapping[str, StaticTree]:
    """The trees that lie as data in a plugin's package, by name."""
    paths = json.loads((files(package) / name).read_text(encoding="utf-8"))
    return {tree: StaticTree.of_paths(each) for tree, each in paths.items()}


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
