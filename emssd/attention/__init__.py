"""Attention over ragged batches: the `AttentionBackend` interface and what paged backends share."""

from emssd.attention.interface import AttentionBackend, Kept, KVCacheSpec, KVUsage, LayerSpec, NativeStep, StepPlan
from emssd.attention.masked import StepMask, StepWatch, additive_mask, masked_attention
from emssd.attention.packed import Drafted, PackedInputs, StepInputs, on_device, runs, to_host
from emssd.attention.paged import PagedBackend, PagedKernels
from emssd.attention.pages import PageTable
from emssd.attention.pool import KVPool, PageShapes
from emssd.attention.trees import Parents, ancestors, depths, hidden_nodes

__all__ = [
    "AttentionBackend",
    "Drafted",
    "KVCacheSpec",
    "KVPool",
    "KVUsage",
    "Kept",
    "LayerSpec",
    "NativeStep",
    "PackedInputs",
    "PageShapes",
    "PageTable",
    "PagedBackend",
    "PagedKernels",
    "Parents",
    "StepInputs",
    "StepMask",
    "StepPlan",
    "StepWatch",
    "additive_mask",
    "ancestors",
    "depths",
    "hidden_nodes",
    "masked_attention",
    "on_device",
    "runs",
    "to_host",
]
