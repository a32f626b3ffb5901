"""Plugin `drafter=eagle3`: a trained EAGLE-3 head drafts from the target's hidden states.

Li et al. 2025, arXiv 2503.01840. Heads are read from the files of several trainers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from emssd.drafting import Drafter, DrafterContext
from emssd.plugins import DrafterSpec, hookimpl

__all__ = ["Eagle3Config", "LayerIds", "TreeKind", "emssd_drafters"]


class TreeKind(str, Enum):
    """What a row's draft looks like."""

    chain = "chain"
    dynamic = "dynamic"


class LayerIds(str, Enum):
    """What the numbers of layers in a head's config mean.

    ``hs`` k is the residual stream before layer k, counted from 0 (vLLM, speculators). ``output`` k is the output of
    layer k, so the stream before layer k + 1 (SGLang, SpecForge).
    """

    auto = "auto"
    hs = "hs"
    output = "output"


@dataclass
class Eagle3Config:
    """Options of `drafter=eagle3`.

    A level of a tree costs one pass of the head, and a node one token of the target. The defaults are for batches, and
    for CPUs; EAGLE-2 drafts 59 nodes on 8 levels, 10 of each expanded, for one row on a GPU.

    Attributes:
        path: folder, file of weights or hub id of the head, which must be trained for this target. ``demo-eagle3`` is
            the one that goes with ``model.path=demo``.
        tree: dynamic follows the most probable ways, and keeps the most probable nodes (EAGLE-2, arXiv 2406.16858).
            chain follows the head's first choices.
        num_nodes: of dynamic, the most nodes of a row's tree.
        depth: the most levels of a tree, or tokens of a chain.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each.
        layer_ids: what the numbers of layers in the head's config mean: hs, the residual stream before a layer, or
            output, that of a layer. auto decides by where the config has them. A wrong one changes no token, but hardly
            anything is accepted.
    """

    path: str | None = "demo-eagle3"
    tree: TreeKind = TreeKind.dynamic
    num_nodes: int = 16
    depth: int = 5
    top_k: int = 4
    layer_ids: LayerIds = LayerIds.auto


def _build(config: Eagle3Config, context: DrafterContext) -> Drafter:
    from emssd_eagle3.drafter import Eagle3Drafter

    return Eagle3Drafter.load(config, context)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("eagle3", Eagle3Config, _build)]
