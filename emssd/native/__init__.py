"""Kernels for CPUs in C++: built on first use for the machine at hand, kept for later runs.

They make two things fast: attention over a ragged, paged KV cache in one call per layer (`backend=ragged`), and linear
layers whose weights are laid out once (`model.compile`). Where there is no C++ compiler, both run in PyTorch alone.
"""

from emssd.native.build import NativeError, cache_dir, kernels_key, load_kernels, loaded_kernels, why_unavailable

__all__ = ["NativeError", "cache_dir", "kernels_key", "load_kernels", "loaded_kernels", "why_unavailable"]
