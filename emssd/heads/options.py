"""What drafters with trained heads can be told: `TreeOptions` those with EAGLE heads, `TreeKind` all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from emssd.drafting.shapes import DynamicShape, Shape, check_at_least_one
from emssd.errors import ConfigError, did_you_mean
from emssd.heads.published import PublishedShape
from emssd.heads.trees import StaticTree, read_trees

__all__ = ["TreeKind", "TreeOptions", "chosen", "head_path", "shape_of", "static_tree"]

Chosen = TypeVar("Chosen", bound=Enum)


class TreeKind(str, Enum):
    """What a row's draft looks like."""

    chain = "chain"
    static = "static"
    dynamic = "dynamic"


@dataclass
class TreeOptions:
    """Options of drafters with an EAGLE head.

    A level of a tree costs one pass of the head, and a node one token of the target. The defaults are for batches, and
    for CPUs; EAGLE-2 drafts 59 nodes on 8 levels, 10 of each expanded, for one row on a GPU.

    Attributes:
        path: folder, file of weights or hub id of the head, which must be trained for this target.
        tree: dynamic follows the most probable ways, and keeps the most probable nodes (EAGLE-2, arXiv 2406.16858).
            static drafts the same tree in every step (EAGLE-1, arXiv 2401.15077). chain follows the head's first
            choices.
        num_nodes: of dynamic, the most nodes of a row's tree.
        depth: of dynamic and chain, the most levels of a tree, or tokens of a chain.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.
        static_tree: of static, ``mc_sim_7b_63``, the 25 nodes on 5 levels of EAGLE-1's authors, or a JSON file with a
            list of paths: ``[a, b]`` is the b-th likeliest token behind the a-th likeliest, counted from 0.
    """

    path: str | None = None
    tree: TreeKind = TreeKind.dynamic
    num_nodes: int = 16
    depth: int = 5
    top_k: int = 4
    static_tree: str = "mc_sim_7b_63"


def head_path(path: str | None, drafter: str) -> str:
    """Where the heads of the `drafter` of this name are.

    Raises:
        ConfigError: its option does not say.
    """
    if path is None:
        raise ConfigError(f"drafter={drafter} drafts with a trained head: give drafter.path=FOLDER, or a hub id")
    return path


def shape_of(options: TreeOptions) -> Shape:
    """The shape that `options` ask for: a chain is a tree of one child for each node.

    Raises:
        ConfigError: an option cannot work.
    """
    kind = chosen(TreeKind, "tree", options.tree)
    if kind is TreeKind.static:
        return PublishedShape(static_tree(options.static_tree, read_trees("emssd.heads", "eagle_trees.json")))
    if kind is TreeKind.chain:
        check_at_least_one(depth=options.depth)
        return DynamicShape(options.depth, options.depth, 1)
    return DynamicShape(options.num_nodes, options.depth, options.top_k)


def chosen(kinds: type[Chosen], option: str, value: object) -> Chosen:
    """The one of `kinds` that has this value.

    Raises:
        ConfigError: none has.
    """
    try:
        return kinds(value)
    except ValueError:
        names = [str(kind.value) for kind in kinds]
        raise ConfigError(
            f"drafter.{option} is {value!r}{did_you_mean(str(value), names) or ';'} choose one of {', '.join(names)}"
        ) from None


def static_tree(name: str, known: Mapping[str, StaticTree]) -> StaticTree:
    """The tree that the option ``static_tree`` names: one of those that are `known`, or of a JSON file.

    Raises:
        ConfigError: there is none.
    """
    if name in known:
        return known[name]
    if not name.endswith(".json"):
        raise ConfigError(
            f"drafter.static_tree is {name!r}{did_you_mean(name, known) or ';'} choose one of {', '.join(known)}, or "
            f"give a file whose name ends with .json"
        )
    try:
        tree = StaticTree.of_paths(json.loads(Path(name).expanduser().read_text(encoding="utf-8")))
        if not tree.ranks or not all(type(rank) is int and rank >= 0 for rank in tree.ranks):
            raise ValueError("it needs a node at least, and numbers from 0 on")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"drafter.static_tree={name} is no tree ({error}); give a JSON list of paths as in [[0], [1], [0, 0]], a "
            f"parent before its children"
        ) from error
    return tree
