"""Plugin `drafter=self`: the target's own weights, rounded to 4 bits, draft on the target's own KV cache.

Without training, as in ML-SpecQD (arXiv 2503.13565) and QuantSpec (arXiv 2502.10424).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.drafting import Drafter, DrafterContext
from emssd.plugins import DrafterSpec, hookimpl

__all__ = ["SelfConfig", "TreeKind"]


class TreeKind(str, Enum):
    """The shape of a row's draft."""

    chain = "chain"
    dynamic = "dynamic"


@dataclass
class SelfConfig:
    """Options of `drafter=self`.

    A drafted token, or a level of a tree, costs one pass over the rounded weights: of 4 bits, a quarter of the bytes of
    bfloat16. It is meant for where reading weights takes most of a step: a few rows of a model that is much larger than
    the caches, on a CPU with `model.compile=true`.

    Attributes:
        bits: of a rounded weight. 4 has a scale for each 32 inputs, and rounds activations to bytes. 8 has one for each
            output.
        layers: of the target's layers, how many draft, from the first on, uncompiled; ``null`` for all.
        tree: chain follows the first choices. dynamic follows the most probable ways, and keeps the most probable nodes
            (EAGLE-2, arXiv 2406.16858).
        depth: the most tokens of a chain, or levels of a tree.
        num_nodes: of dynamic, the most nodes of a row's tree.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.
        min_confidence: after a drafted token that is less probable nothing is drafted; 0 never ends a draft early.
    """

    bits: int = 4
    layers: int | None = None
    tree: TreeKind = TreeKind.chain
    depth: int = 4
    num_nodes: int = 16
    top_k: int = 4
    min_confidence: float = 0.0


def _build(config: SelfConfig, context: DrafterContext) -> Drafter:
    from emssd.drafters import DynamicShape, SharedDrafter, check_at_least_one, chosen
    from emssd.errors import ConfigError

    check_at_least_one(depth=config.depth)
    if context.target is None:
        raise ConfigError("drafter=self rounds the weights of the target, and there is no model to take them of")
    is_chain = chosen(TreeKind, "tree", config.tree) is TreeKind.chain
    num_nodes, top_k = (config.depth, 1) if is_chain else (config.num_nodes, config.top_k)
    shape = DynamicShape(num_nodes, config.depth, top_k, min_confidence=config.min_confidence)
    return SharedDrafter(context.target.rounded(config.bits, config.layers), context.vocab_size, shape)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("self", SelfConfig, _build)]
