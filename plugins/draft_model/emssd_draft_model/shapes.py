"""Which nodes of a tree are expanded, and how many children they get: the `Shape` of a draft model's trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul
from typing import Any

from emssd.errors import ConfigError, did_you_mean
from emssd_draft_model import DraftModelConfig, TreeKind
from emssd_draft_model.growing import GrowingTree

__all__ = ["DynamicShape", "Expansion", "Shape", "StaticShape", "shape_of"]

Expansion = tuple[int, Seq[int]]
"""A node to expand, and which of its likeliest tokens become its children, counted from 0."""


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
        """Which nodes of the `frontier` of `tree` to expand. At first it is ``[-1]``; later the best come first."""

    @abstractmethod
    def most_cached(self, num_nodes: int, depth: int) -> int:
        """The most nodes that are expanded, besides -1, in a tree of at most `num_nodes` nodes and `depth` levels."""

    def learn(self, ranks: Seq[int | None]) -> None:
        """The target's choice behind the newest token of a row, then behind each accepted node that was expanded.

        Each is the rank among the draft model's most probable tokens there, ``None`` if it was not among `width`.
        """

    def replan(self) -> None:
        """Called once after every step: what was learnt may be put to use."""

    def reset(self) -> None:
        """Forget what was learnt."""


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
        return [(node, range(self._expansion[len(tree.way(node))])) for node in frontier]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return sum(min(size, num_nodes) for size in self._levels[: max(0, depth - 1)])


class DynamicShape(Shape):
    """The most probable nodes of each level are expanded (Li et al. 2024, EAGLE-2, arXiv 2406.16858, §4).

    All nodes are ranked again in the end, and the `num_nodes` most probable drafted.

    Args:
        num_nodes: the most that are drafted.
        depth: the most levels.
        top_k: nodes of a level that are expanded, and children of each.
        temperature: below 1, as the target takes its first choice more often than the draft model's probability says.
    """

    def __init__(self, num_nodes: int, depth: int, top_k: int, temperature: float = 1.0) -> None:
        _at_least_one(num_nodes=num_nodes, depth=depth, top_k=top_k)
        if not 0.01 <= temperature <= 100:
            raise ConfigError(f"drafter.temperature is {temperature}; it must be from 0.01 to 100")
        self.num_nodes, self.depth, self.width, self.temperature = num_nodes, depth, top_k, temperature

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [(node, range(self.width)) for node in frontier[: self.width]]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return min(self.width, num_nodes - 1) * max(0, depth - 1)


def shape_of(config: DraftModelConfig) -> Shape | None:
    """The shape that `config` asks for; ``None`` for chains.

    Raises:
        ConfigError: an option cannot work.
    """
    from emssd_draft_model.sampled import BeamShape, ChildrenShape
    from emssd_draft_model.sequoia import SequoiaShape, read_acceptance

    kind = _kind(config.tree)
    if config.acceptance is not None and kind is not TreeKind.sequoia:
        raise ConfigError(f"drafter.acceptance is set, but drafter.tree is {kind.value}; only sequoia plans for it")
    if kind is TreeKind.static:
        return StaticShape(config.expansion)
    if kind is TreeKind.dynamic:
        return DynamicShape(config.num_nodes, config.depth, config.top_k, config.temperature)
    if kind is TreeKind.sequoia:
        _at_least_one(num_nodes=config.num_nodes, depth=config.depth, top_k=config.top_k)
        table = None if config.acceptance is None else read_acceptance(config.acceptance)
        return SequoiaShape(config.num_nodes, config.depth, config.top_k, table)
    if kind is TreeKind.rsd_c:
        return ChildrenShape(config.expansion)
    if kind is TreeKind.rsd_s:
        return BeamShape(config.width, config.depth)
    return None


def _kind(chosen: Any) -> TreeKind:
    try:
        return TreeKind(chosen)
    except ValueError:
        names = [kind.value for kind in TreeKind]
        raise ConfigError(
            f"drafter.tree is {chosen!r}{did_you_mean(str(chosen), names) or ';'} choose one of {', '.join(names)}"
        ) from None


def _at_least_one(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"drafter.{name} is {value}; it must be at least 1")
