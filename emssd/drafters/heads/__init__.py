"""Trained heads: their published files, and their decoder layers."""

from emssd.drafters.heads.config import DecoderConfig
from emssd.drafters.heads.files import Checkpoint, read_checkpoint
from emssd.drafters.heads.formats import Format, detect, expect
from emssd.drafters.heads.head import Head, LayerHead
from emssd.drafters.heads.layers import Attend, HeadLayer, HeadNorm, Rotary
from emssd.drafters.heads.loading import HeadFiles, Loaded
from emssd.drafters.heads.target import LAST_NORMED, Embed, Project, TargetSizes
from emssd.drafters.heads.trees import StaticTree, Way, read_trees
from emssd.drafters.heads.weights import drop_copies, fill, made_empty, rename

__all__ = [
    "LAST_NORMED",
    "Attend",
    "Checkpoint",
    "DecoderConfig",
    "Embed",
    "Format",
    "Head",
    "HeadFiles",
    "HeadLayer",
    "HeadNorm",
    "LayerHead",
    "Loaded",
    "Project",
    "Rotary",
    "StaticTree",
    "TargetSizes",
    "Way",
    "detect",
    "drop_copies",
    "expect",
    "fill",
    "made_empty",
    "read_checkpoint",
    "read_trees",
    "rename",
]
