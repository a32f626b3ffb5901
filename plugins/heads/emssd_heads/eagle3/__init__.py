"""Plugin `drafter=eagle3`: a trained EAGLE-3 head drafts from the target's hidden states.

Li et al. 2025, arXiv 2503.01840. Heads are read from the files of several trainers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

from emssd.drafting import Drafter, DrafterContext
from emssd.hooks import DrafterSpec, offering
from emssd_heads import PairedDrafter, TargetWeights, TreeOptions, shape_of

__all__ = ["Eagle3Config", "LayerIds"]


class LayerIds(str, Enum):
    """The meaning of the numbers of layers in a head's config.

    ``hs`` k is the residual stream before layer k, counted from 0 (vLLM, speculators). ``output`` k is the output of
    layer k, so the stream before layer k + 1 (SGLang, SpecForge).
    """

    auto = "auto"
    hs = "hs"
    output = "output"


@dataclass
class Eagle3Config(TreeOptions):
    """Options of `drafter=eagle3`.

    A level of a tree costs one pass of the head, and a node one token of the target. The defaults are for batches, and
    for CPUs; EAGLE-2 drafts 59 nodes on 8 levels, 10 of each expanded, for one row on a GPU.

    Attributes:
        path: as of all heads. ``demo-eagle3`` is the one that goes with ``model.path=demo``.
        layer_ids: the meaning of the numbers of layers in the head's config: hs, the residual stream before a layer, or
            output, that of a layer. A wrong one changes no token, but hardly anything is accepted. auto decides by the
            config; where both are possible, a warning names the other one.
    """

    path: str | None = "demo-eagle3"
    layer_ids: LayerIds = LayerIds.auto


def _build(config: Eagle3Config, context: DrafterContext) -> Drafter:
    from emssd_heads.eagle3.drafter import ParallelDrafter, load_eagle3

    shape, lent = shape_of(config, "emssd_heads", top_k=config.top_k), TargetWeights.by(context, "eagle3")
    layer_ids = LayerIds(config.layer_ids)
    loaded = lent.loaded(config.path, partial(load_eagle3, layer_ids=layer_ids))
    head, is_parallel = loaded.head, loaded.head.mask_token_id is not None
    return (ParallelDrafter if is_parallel else PairedDrafter)(head, loaded.layers, shape, lent)


emssd_drafters = offering(DrafterSpec("eagle3", Eagle3Config, _build, reads=("eagle3", "peagle")))
