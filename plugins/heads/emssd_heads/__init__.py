"""Trained heads: their published files, layers and KV, and the drafters that eight families of heads have in common.

A plugin with an EAGLE head of its own has a `PairedHead`, reads its files with `HeadFiles`, and returns a
`PairedDrafter`. Other heads are run by subclasses of `StatesDrafter`.
"""

from emssd.model.compile.packed import round_drafter
from emssd_heads.config import LAST_NORMED, DecoderConfig, Embed, Project, TargetSizes
from emssd_heads.files import Checkpoint
from emssd_heads.formats import Format
from emssd_heads.head import LayerHead
from emssd_heads.layers import Angles, Attend, HeadLayer, HeadNorm, Rotary
from emssd_heads.loading import HeadFiles, Loaded, TargetWeights
from emssd_heads.options import HeadTreeOptions, TreeKind, TreeOptions, shape_of
from emssd_heads.paired import PairedDrafter, PairedHead
from emssd_heads.runner import HeadRunner
from emssd_heads.states import StatesDrafter

__all__ = [
    "LAST_NORMED",
    "Angles",
    "Attend",
    "Checkpoint",
    "DecoderConfig",
    "Embed",
    "Format",
    "HeadFiles",
    "HeadLayer",
    "HeadNorm",
    "HeadRunner",
    "HeadTreeOptions",
    "LayerHead",
    "Loaded",
    "PairedDrafter",
    "PairedHead",
    "Project",
    "Rotary",
    "StatesDrafter",
    "TargetSizes",
    "TargetWeights",
    "TreeKind",
    "TreeOptions",
    "round_drafter",
    "shape_of",
]
