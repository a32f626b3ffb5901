"""The `Shape` of Hydra's trees, as the options ask for one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.drafting.levels import GrowingTree
from emssd.drafting.shapes import DynamicShape, Expansion, Shape, check_at_least_one
from emssd.heads import StaticTree, TreeKind, chosen, named_tree, read_trees
from emssd_hydra import HydraConfig

__all__ = ["PublishedShape", "check_options", "shape_of"]


class PublishedShape(Shape):
    """The same nodes in every step.

    Args:
        tree: these.
    """

    def __init__(self, tree: StaticTree) -> None:
        self._children = tree.children()
        self.num_nodes, self.depth, self.width = len(tree.parents), max(tree.depths), 1 + max(tree.ranks)

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        expansions = ((node, self._children.get(tree.way(node), ())) for node in frontier)
        return [(node, ranks) for node, ranks in expansions if ranks]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return sum(0 < len(way) < depth for way in self._children)


def check_options(config: HydraConfig) -> TreeKind:
    """The kind of tree that `config` asks for.

    Raises:
        ConfigError: an option cannot work.
    """
    depth = 1 if config.depth is None else config.depth
    check_at_least_one(num_nodes=config.num_nodes, depth=depth, top_k=config.top_k)
    named_tree(read_trees("emssd_hydra"), config.static_tree)
    return chosen(TreeKind, "tree", config.tree)


def shape_of(config: HydraConfig, num_heads: int) -> Shape:
    """What `config` asks for, of so many heads: a chain is a tree of one child for each node."""
    kind, depth = check_options(config), min(num_heads, config.depth or num_heads)
    if kind is TreeKind.chain:
        return DynamicShape(depth, depth, 1)
    if kind is TreeKind.dynamic:
        return DynamicShape(config.num_nodes, depth, config.top_k)
    return PublishedShape(named_tree(read_trees("emssd_hydra"), config.static_tree).shallow(depth))
