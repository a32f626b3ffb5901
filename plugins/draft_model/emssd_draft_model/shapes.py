"""The `Shape` of a draft model's trees, as its options ask for one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

from emssd.drafters import DynamicShape, GrowingTree, Shape
from emssd.drafting.shapes import Expansion, check_at_least_one, chosen
from emssd.errors import ConfigError
from emssd_draft_model import DraftModelConfig, TreeKind

__all__ = ["StaticShape", "shape_of"]


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


def shape_of(config: DraftModelConfig) -> Shape | None:
    """The shape that `config` asks for; ``None`` for chains. Raises ConfigError: an option cannot work."""
    from emssd_draft_model.sampled import BeamShape, ChildrenShape
    from emssd_draft_model.sequoia import SequoiaShape, read_acceptance

    kind = chosen(TreeKind, "tree", config.tree)
    if config.acceptance is not None and kind is not TreeKind.sequoia:
        raise ConfigError(f"drafter.acceptance is set, but drafter.tree is {kind.value}; only sequoia plans for it")
    if kind is TreeKind.static:
        return StaticShape(config.expansion)
    if kind is TreeKind.dynamic:
        return DynamicShape(config.num_nodes, config.depth, config.top_k, config.temperature)
    if kind is TreeKind.sequoia:
        check_at_least_one(num_nodes=config.num_nodes, depth=config.depth, top_k=config.top_k)
        table = None if config.acceptance is None else read_acceptance(config.acceptance)
        return SequoiaShape(config.num_nodes, config.depth, config.top_k, table)
    if kind is TreeKind.rsd_c:
        return ChildrenShape(config.expansion)
    if kind is TreeKind.rsd_s:
        return BeamShape(config.width, config.depth)
    return None
