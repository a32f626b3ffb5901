"""The `Shape` of a draft model's trees, as its options ask for one."""

from __future__ import annotations

from emssd.drafters import BeamShape, ChildrenShape, DynamicShape, Shape, StaticShape, check_at_least_one, chosen
from emssd.errors import ConfigError
from emssd_draft_model import DraftModelConfig, TreeKind
from emssd_draft_model.sequoia import SequoiaShape, read_acceptance

__all__ = ["shape_of"]


def shape_of(config: DraftModelConfig) -> Shape | None:
    """The shape that `config` asks for; ``None`` for chains. Raises ConfigError: an option cannot work."""
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
