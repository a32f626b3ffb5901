"""`Candidates`: which combinations of the heads' choices a tree may hold."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.drafting.shapes import check_at_least_one
from emssd.heads import StaticTree, Way, read_trees
from emssd.heads.options import TreeKind, chosen, static_tree
from emssd_medusa import MedusaConfig

__all__ = ["Candidates", "candidates_of", "check_options"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that may be drafted. The most probable of them are.

    Attributes:
        num_nodes: the most nodes of a tree.
        depth: the most levels.
        width: how many of a head's most probable tokens are looked at.
        children: by the way to a node, which of these may follow it; ``None`` if all may.
    """

    num_nodes: int
    depth: int
    width: int
    children: Mapping[Way, Seq[int]] | None = None

    def ranks(self, way: Way) -> Seq[int]:
        """Which of a head's most probable tokens may follow the node at the end of `way`, counted from 0."""
        return range(self.width) if self.children is None else self.children.get(way, ())


def check_options(config: MedusaConfig) -> TreeKind:
    """The kind of tree that `config` asks for.

    Raises:
        ConfigError: an option cannot work.
    """
    check_at_least_one(num_nodes=config.num_nodes, depth=1 if config.depth is None else config.depth)
    _tree(config)
    return chosen(TreeKind, "tree", config.tree)


def candidates_of(config: MedusaConfig, num_heads: int) -> Candidates:
    """What `config` asks for, of so many heads."""
    kind, depth = check_options(config), min(num_heads, config.depth or num_heads)
    if kind is TreeKind.chain:
        return Candidates(depth, depth, 1)
    if kind is TreeKind.dynamic:
        return Candidates(config.num_nodes, depth, config.num_nodes)
    tree = _tree(config).shallow(depth)
    return Candidates(len(tree.parents), depth, 1 + max(tree.ranks), tree.children())


def _tree(config: MedusaConfig) -> StaticTree:
    return static_tree(config.static_tree, read_trees("emssd_medusa"))
