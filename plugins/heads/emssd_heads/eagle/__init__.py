"""Plugin `drafter=eagle`: a trained EAGLE-1 or EAGLE-2 head drafts from the target's last hidden state.

Li et al. 2024, arXiv 2401.15077 and 2406.16858. Both have the same heads, and other trees.
"""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.hooks import DrafterSpec, offering
from emssd_heads import PairedDrafter, TargetWeights, TreeOptions, shape_of

__all__ = ["EagleConfig"]


@dataclass
class EagleConfig(TreeOptions):
    """Options of `drafter=eagle`.

    A level of a tree costs one pass of the head, and a node one token of the target. The defaults are for batches, and
    for CPUs; EAGLE-2 drafts 59 nodes on 8 levels, 10 of each expanded, for one row on a GPU.
    """


def _build(config: EagleConfig, context: DrafterContext) -> Drafter:
    from emssd_heads.eagle.head import load_eagle

    shape, lent = shape_of(config, "emssd_heads", top_k=config.top_k), TargetWeights.by(context, "eagle")
    loaded = lent.loaded(config.path, load_eagle)
    return PairedDrafter(loaded.head, loaded.layers, shape, lent)


emssd_drafters = offering(DrafterSpec("eagle", EagleConfig, _build, reads=("eagle",)))
