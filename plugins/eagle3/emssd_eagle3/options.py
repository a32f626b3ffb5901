"""What the options of `drafter=eagle3` ask for."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from emssd.drafting.shapes import DynamicShape, check_at_least_one
from emssd.errors import ConfigError, did_you_mean
from emssd_eagle3 import Eagle3Config, TreeKind

__all__ = ["chosen", "shape_of"]

Chosen = TypeVar("Chosen", bound=Enum)


def shape_of(config: Eagle3Config) -> DynamicShape:
    """The shape that `config` asks for: a chain is a tree of one child for each node.

    Raises:
        ConfigError: an option cannot work.
    """
    if chosen(TreeKind, "tree", config.tree) is TreeKind.chain:
        check_at_least_one(depth=config.depth)
        return DynamicShape(config.depth, config.depth, 1)
    return DynamicShape(config.num_nodes, config.depth, config.top_k)


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
