"""Kernels for CPUs in C++: built on first use for the machine at hand, kept for later runs.

They make three things fast: attention over a ragged, paged KV cache in one call per layer (`backend=ragged`), linear
layers whose weights are laid out once (`model.compile`), and the choice of tokens. Where there is no C++ compiler, all
of it runs in PyTorch.
"""

from emssd.native.build import (
    NativeError,
    fallback_reason,
    free_module,
    kernels_key,
    load_kernels,
    loaded_kernels,
    why_unavailable,
)
from emssd.native.cache import CacheError, Entry, cache_dir, entry, is_kept, private_folder, room_hint

__all__ = [
    "CacheError",
    "Entry",
    "NativeError",
    "cache_dir",
    "entry",
    "fallback_reason",
    "free_module",
    "is_kept",
    "kernels_key",
    "load_kernels",
    "loaded_kernels",
    "private_folder",
    "room_hint",
    "why_unavailable",
]
