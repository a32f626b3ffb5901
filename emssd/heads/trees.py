"""Static token trees: who descends from whom, and by which of its parent's choices, the same in every step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.resources import files

from emssd.attention.trees import depths

__all__ = ["StaticTree", "read_trees"]


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
        places: dict[tuple[int, ...], int] = {(): -1}
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


def read_trees(package: str, name: str = "trees.json") -> Mapping[str, StaticTree]:
    """The trees that lie as data in a plugin's package, by name."""
    paths = json.loads((files(package) / name).read_text(encoding="utf-8"))
    return {tree: StaticTree.of_paths(each) for tree, each in paths.items()}
