"""Trees of one shape, whatever the draft model computes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

from emssd.drafters import GrowingTree, Shape
from emssd.drafting.shapes import Expansion
from emssd.errors import ConfigError

__all__ = ["StaticShape"]


class StaticShape(Shape):
    """Every node of level ``d`` has ``expansion[d]`` children (Miao et al. 2023, SpecInfer, arXiv 2305.09781, §3).

    Args:
        expansion: ``[depth]`` integers; the newest token of the row is level 0.
    """

    def __init__(self, expansion: Seq[int]) -> None:
        self._expansion = tuple(expansion)
        if not self._expansion or min(self._expansion) < 1:
            raise ConfigError(
                f"drafter.expansion is {list(expansion)}; give the number of children of a node for each level, at "
                f"least one level, and at least 1 for each, as in drafter.expansion='[2,2,1]'"
            )
        self._levels = tuple(accumulate(self._expansion, mul))
        self.num_nodes, self.depth, self.width = sum(self._levels), len(self._levels), max(self._expansion)

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [(node, range(self._expansion[tree.num_levels])) for node in frontier]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return sum(min(size, num_nodes) for size in self._levels[: max(0, depth - 1)])
