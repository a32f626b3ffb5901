"""Plugin `drafter=early_exit`: the target's own first layers draft, with its final norm and LM head after them.

Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710. Nothing is loaded, and nothing needs training to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.drafting import Drafter, DrafterContext
from emssd.plugins import DrafterSpec, hookimpl

__all__ = ["EarlyExitConfig", "TreeKind"]


class TreeKind(str, Enum):
    """The shape of a row's draft."""

    chain = "chain"
    dynamic = "dynamic"


@dataclass
class EarlyExitConfig:
    """Options of `drafter=early_exit`.

    A drafted token, or a level of a tree, costs one pass of the first layers and of the LM head. That is meant for
    models that were trained to exit early, as those of LayerSkip; of others, less is accepted.

    Attributes:
        num_layers: of the target's layers, how many draft, from the first on; ``null`` for a quarter, rounded up.
        tree: chain follows the first choices. dynamic follows the most probable ways, and keeps the most probable nodes
            (EAGLE-2, arXiv 2406.16858).
        depth: the most tokens of a chain, or levels of a tree.
        num_nodes: of dynamic, the most nodes of a row's tree.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.
        min_confidence: after a drafted token that is less probable, as the first layers see it, nothing is drafted; 0
            never ends a draft early.
    """

    num_layers: int | None = None
    tree: TreeKind = TreeKind.chain
    depth: int = 4
    num_nodes: int = 16
    top_k: int = 4
    min_confidence: float = 0.0


def _build(config: EarlyExitConfig, context: DrafterContext) -> Drafter:
    from emssd.drafters import DynamicShape, ModelDrafter, check_at_least_one, chosen, shallow_runner

    check_at_least_one(depth=config.depth)
    is_chain = chosen(TreeKind, "tree", config.tree) is TreeKind.chain
    num_nodes, top_k = (config.depth, 1) if is_chain else (config.num_nodes, config.top_k)
    shape = DynamicShape(num_nodes, config.depth, top_k, min_confidence=config.min_confidence)
    runner = shallow_runner(context, config.num_layers, trees=shape.width > 1)
    return ModelDrafter(runner, context.vocab_size, shape)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("early_exit", EarlyExitConfig, _build)]
