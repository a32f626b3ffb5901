"""Attention over ragged batches: the `AttentionBackend` interface and what paged backends share."""

from emssd.attention.interface import AttentionBackend, Kept, KVCacheSpec, KVUsage, LayerSpec, StepPlan
from emssd.attention.masked import StepMask, additive_mask, masked_attention
from emssd.attention.native import NativeStep
from emssd.attention.packed import Drafted, PackedInputs, StepInputs
from emssd.attention.paged import PagedBackend, PagedKernels
from emssd.attention.pages import PageTable
from emssd.attention.pool import KVPool

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
    "PageTable",
    "PagedBackend",
    "PagedKernels",
    "StepInputs",
    "StepMask",
    "StepPlan",
    "additive_mask",
    "masked_attention",
]
