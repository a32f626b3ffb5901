"""Options of drafters that run layers of the target."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.draft_models.shapes import DynamicShape
from emssd.errors.ranges import AtLeastOne, Share

__all__ = ["LayerTreeKind", "LayerTreeOptions"]


class LayerTreeKind(str, Enum):
    """The shape of a row's draft, without static trees."""

    chain = "chain"
    dynamic = "dynamic"


@dataclass
class LayerTreeOptions:
    """Options of drafters that run layers of the target.

    Attributes:
        tree: chain follows the first choices. dynamic follows the most probable paths, and keeps the most probable
            nodes (EAGLE-2, arXiv 2406.16858).
        depth: the most tokens of a chain, or levels of a tree.
        num_nodes: of dynamic, the most nodes of a row's tree.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.
        min_confidence: after a drafted token that is less probable, as the drafter sees it, nothing is drafted; 0 never
            ends a draft early.
    """

    tree: LayerTreeKind = LayerTreeKind.chain
    depth: AtLeastOne = 4
    num_nodes: AtLeastOne = 16
    top_k: AtLeastOne = 4
    min_confidence: Share = 0.0

    def shape(self) -> DynamicShape:
        """The shape that they ask for."""
        num_nodes, top_k = (self.depth, 1) if self.tree == LayerTreeKind.chain else (self.num_nodes, self.top_k)
        return DynamicShape(num_nodes, self.depth, top_k, min_confidence=self.min_confidence)
