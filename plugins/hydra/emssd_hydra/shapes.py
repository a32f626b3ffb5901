"""The `Shape` of Hydra's trees, as the options ask for one."""

from __future__ import annotations

from emssd.drafting.shapes import DynamicShape, Shape, check_at_least_one
from emssd.heads import StaticTree, read_trees
from emssd.heads.options import TreeKind, chosen, static_tree
from emssd.heads.published import PublishedShape
from emssd_hydra import HydraConfig

__all__ = ["check_options", "shape_of"]


def check_options(config: HydraConfig) -> TreeKind:
    """The kind of tree that `config` asks for.

    Raises:
        ConfigError: an option cannot work.
    """
    depth = 1 if config.depth is None else config.depth
    check_at_least_one(num_nodes=config.num_nodes, depth=depth, top_k=config.top_k)
    _tree(config)
    return chosen(TreeKind, "tree", config.tree)


def shape_of(config: HydraConfig, num_heads: int) -> Shape:
    """What `config` asks for, of so many heads: a chain is a tree of one child for each node."""
    kind, depth = check_options(config), min(num_heads, config.depth or num_heads)
    if kind is TreeKind.chain:
        return DynamicShape(depth, depth, 1)
    if kind is TreeKind.dynamic:
        return DynamicShape(config.num_nodes, depth, config.top_k)
    return PublishedShape(_tree(config).shallow(depth))


def _tree(config: HydraConfig) -> StaticTree:
    return static_tree(config.static_tree, read_trees("emssd_hydra"))
