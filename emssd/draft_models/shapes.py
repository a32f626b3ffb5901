"""The `Shape` of trees that grow level by level: the nodes that are expanded, and their children; and options."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from operator import mul

from emssd.draft_models.growing_tree import Expansion, GrowingTree
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne, Share

__all__ = ["DynamicShape", "Expansion", "LayerTreeKind", "LayerTreeOptions", "Shape", "StaticShape"]


class Shape(ABC):
    """Decides level by level how the trees of all rows grow.

    Attributes:
        num_nodes: the most nodes of a tree.
        depth: the most levels.
        width: how many of a node's most probable tokens it looks at.
        temperature: that the draft model's logits are divided by before they are probabilities. Where the target
            samples, its noise is in them.
    """

    num_nodes: int
    depth: int
    width: int
    temperature: float = 1.0

    @abstractmethod
    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        """The nodes of the `frontier` of `tree` to expand. At first it is ``[-1]``; later the best come first."""

    @abstractmethod
    def most_cached(self, num_nodes: int, depth: int) -> int:
        """The most nodes that are expanded, besides -1, in a tree of at most `num_nodes` nodes and `depth` levels."""

    def learn(self, ranks: Seq[int | None]) -> None:
        """The target's choice after the newest token of a row, then after each accepted node that was expanded.

        Each is the rank among the draft model's most probable tokens there, ``None`` if it was not among `width`.
        """

    def replan(self) -> None:
        """Called once after every step: what was learnt may be put to use."""

    def reset(self) -> None:
        """Forget what was learnt."""


class DynamicShape(Shape):
    """The most probable nodes of each level are expanded (Li et al. 2024, EAGLE-2, arXiv 2406.16858, §4).

    All nodes are ranked again in the end, and the `num_nodes` most probable drafted.

    Args:
        num_nodes: the most that are drafted.
        depth: the most levels.
        top_k: nodes of a level that are expanded, and children of each.
        temperature: below 1, as the target takes its first choice more often than the draft model's probability says.
        min_confidence: a node that is less probable after its parent gets no children.

    Attributes:
        least: the logarithm of that probability.
    """

    def __init__(
        self, num_nodes: int, depth: int, top_k: int, temperature: float = 1.0, min_confidence: float = 0.0
    ) -> None:
        self.num_nodes, self.depth, self.width, self.temperature = num_nodes, depth, top_k, temperature
        self.least = math.log(min_confidence) if min_confidence else -math.inf

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        best = frontier[: self.width]
        return [(node, range(self.width)) for node in best if node < 0 or tree.log_probs[node] >= self.least]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return min(self.width, num_nodes - 1) * max(0, depth - 1)


class StaticShape(Shape):
    """Every node of level ``d`` has ``expansion[d]`` children (Miao et al. 2023, SpecInfer, arXiv 2305.09781, §3).

    Args:
        expansion: ``[depth]`` integers; the newest token of the row is level 0.
    """

    def __init__(self, expansion: Seq[int]) -> None:
        self._expansion = tuple(expansion)
        if not self._expansion:
            raise ConfigError(
                "drafter.expansion is []; give the number of children of a node for each level, as in "
                "drafter.expansion='[2,2,1]'"
            )
        self._levels = tuple(accumulate(self._expansion, mul))
        self.num_nodes, self.depth, self.width = sum(self._levels), len(self._levels), max(self._expansion)

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [(node, range(self._expansion[tree.num_levels])) for node in frontier]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return sum(min(size, num_nodes) for size in self._levels[: max(0, depth - 1)])


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
