"""Options of drafters that run the target itself: its first layers, or its rounded weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.drafting.shapes import DynamicShape
from emssd.errors.ranges import AtLeastOne, Share

__all__ = ["OwnTreeKind", "OwnTreeOptions"]


class OwnTreeKind(str, Enum):
    """The shape of a row's draft."""

    chain = "chain"
    dynamic = "dynamic"


@dataclass
class OwnTreeOptions:
    """The chains and trees of such a drafter.

    Attributes:
        tree: chain follows the first choices. dynamic follows the most probable paths, and keeps the most probable
            nodes (EAGLE-2, arXiv 2406.16858).
        depth: the most tokens of a chain, or levels of a tree.
        num_nodes: of dynamic, the most nodes of a row's tree.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.
        min_confidence: after a drafted token that is less probable nothing is drafted; 0 never ends a draft early.
    """

    tree: OwnTreeKind = OwnTreeKind.chain
    depth: AtLeastOne = 4
    num_nodes: AtLeastOne = 16
    top_k: AtLeastOne = 4
    min_confidence: Share = 0.0

    def shape(self) -> DynamicShape:
        """The shape that the options ask for: a chain is a tree of one child for each node."""
        if self.tree == OwnTreeKind.chain:
            return DynamicShape(self.depth, self.depth, 1, min_confidence=self.min_confidence)
        return DynamicShape(self.num_nodes, self.depth, self.top_k, min_confidence=self.min_confidence)
