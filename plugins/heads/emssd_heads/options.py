"""Options of drafters with trained heads, and the shapes of trees that these ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from pathlib import Path

from emssd.draft_models.growing_tree import GrowingTree
from emssd.draft_models.shapes import DynamicShape, Expansion, Shape
from emssd.errors import ConfigError, did_you_mean
from emssd.errors.ranges import AtLeastOne

__all__ = [
    "HeadTreeOptions",
    "PublishedShape",
    "TreeKind",
    "TreeOptions",
    "read_trees",
    "shape_of",
    "static_tree",
    "tree_of",
]

StaticTree = tuple[tuple[int, ...], ...]
"""Paths to the nodes of a tree of fixed shape, a parent before its children: at each level, the rank of the choice."""


class TreeKind(str, Enum):
    """The shape of a row's draft."""

    chain = "chain"
    static = "static"
    dynamic = "dynamic"


@dataclass
class HeadTreeOptions:
    """Options of drafters with trained heads that draft trees. A depth of ``None`` is one level for each head.

    Attributes:
        path: folder, file of weights or hub id of the head, which must be trained for this target.
        tree: dynamic follows the most probable paths, and keeps the most probable nodes (EAGLE-2, arXiv 2406.16858).
            static drafts the same tree in every step (EAGLE-1, arXiv 2401.15077). chain follows the head's first
            choices.
        num_nodes: of dynamic, the most nodes of a row's tree.
        depth: the most levels of a tree, or tokens of a chain; null for one for each head.
        static_tree: of static, ``mc_sim_7b_63``, the 25 nodes on 5 levels of EAGLE-1's authors, or a JSON file with a
            list of paths: ``[a, b]`` is the b-th likeliest token after the a-th likeliest, counted from 0.
    """

    path: str | None = None
    tree: TreeKind = TreeKind.dynamic
    num_nodes: AtLeastOne = 16
    depth: AtLeastOne | None = None
    static_tree: str = "mc_sim_7b_63"


@dataclass
class TreeOptions(HeadTreeOptions):
    """Options of drafters whose heads run once a level.

    Attributes:
        depth: of dynamic and chain, the most levels of a tree, or tokens of a chain.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.
    """

    depth: AtLeastOne | None = 5
    top_k: AtLeastOne = 4


def shape_of(options: HeadTreeOptions, package: str, num_heads: int | None = None, *, top_k: int) -> Shape:
    """The shape that `options` ask for: a chain is a tree of one child for each node.

    Args:
        options: all are checked, also those that the kind of tree does not need.
        package: where the static trees are.
        num_heads: that draft a level each; ``None`` if one head drafts all levels.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.

    Raises:
        ConfigError: an option cannot work.
    """
    if options.depth is None and num_heads is None:
        raise ConfigError("drafter.depth is null, and one head drafts all levels; give the number of levels")
    kind, static = TreeKind(options.tree), static_tree(options.static_tree, read_trees(package))
    depth = min(most for most in (options.depth, num_heads) if most is not None)
    if kind is TreeKind.static:
        return PublishedShape(static if num_heads is None else tuple(path for path in static if len(path) <= depth))
    return DynamicShape(depth, depth, 1) if kind is TreeKind.chain else DynamicShape(options.num_nodes, depth, top_k)


def static_tree(name: str, published: Mapping[str, StaticTree]) -> StaticTree:
    """The tree that the option ``static_tree`` names: a `published` one, or the tree of a JSON file.

    Raises:
        ConfigError: there is none.
    """
    if name in published:
        return published[name]
    if not name.endswith(".json"):
        raise ConfigError(
            f"drafter.static_tree is {name!r}{did_you_mean(name, published) or ';'} choose one of "
            f"{', '.join(published)}, or give a file whose name ends with .json"
        )
    try:
        tree = tree_of(json.loads(Path(name).expanduser().read_text(encoding="utf-8")))
        if not tree or not all(type(rank) is int and rank >= 0 for path in tree for rank in path):
            raise ValueError("it needs a node at least, and numbers from 0 on")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"drafter.static_tree={name} is no tree ({error}); give a JSON list of paths as in [[0], [1], [0, 0]], a "
            f"parent before its children"
        ) from error
    return tree


def tree_of(paths: Iterable[Seq[int]]) -> StaticTree:
    """A tree from published paths: ``[a, b]`` is the `b`-th best child of the `a`-th best child of the root.

    Raises:
        ValueError: a path comes before its parent, or twice.
    """
    seen: dict[tuple[int, ...], None] = {(): None}
    for path in map(tuple, paths):
        if path in seen or path[:-1] not in seen:
            raise ValueError(f"path {list(path)} comes twice, or before its parent")
        seen[path] = None
    return tuple(seen)[1:]


def read_trees(package: str) -> Mapping[str, StaticTree]:
    """The trees that lie as data in a plugin's package, by name."""
    trees = json.loads((files(package) / "trees.json").read_text(encoding="utf-8"))
    return {name: tree_of(paths) for name, paths in trees.items()}


class PublishedShape(Shape):
    """A tree of the same ranks in every step (Li et al. 2024, EAGLE, arXiv 2401.15077).

    Where fewer nodes may be drafted, the most probable are.

    Args:
        tree: at least one node.
    """

    def __init__(self, tree: StaticTree) -> None:
        self._ranks: dict[tuple[int, ...], list[int]] = {}
        for *parent, rank in sorted(tree):
            self._ranks.setdefault(tuple(parent), []).append(rank)
        self.num_nodes, self.depth, self.width = len(tree), max(map(len, tree)), 1 + max(map(max, tree))

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [(node, ranks) for node in frontier if (ranks := self._ranks.get(tree.path_ranks(node)))]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        levels = [len(parent) for parent in self._ranks]
        return sum(min(levels.count(level), num_nodes - 1) for level in range(1, depth))
