"""The memory of a KV cache: how much it may take, and its pages as tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

import torch

from emssd.attention.interface import KVCacheSpec
from emssd.errors import ConfigError, OutOfMemoryError

__all__ = ["fixed_num_pages", "free_bytes", "kv_bytes", "page_bytes"]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}

PageShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a page of keys, and the shape of a page of values."""


class KVPool:
    """Pages of all layers; none at first.

    Args:
        shapes: of the pages, by layer.
        page_size: tokens per page.
        dtype, device: of keys and values.

    Attributes:
        keys, values: by layer, ``[num_pages, *shape of a page]``. `enlarge` replaces the tensors in these lists.
        num_pages: pages of every layer.
        page_bytes: bytes of one page over all layers.
    """

    def __init__(self, shapes: list[PageShapes], page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size, self.num_pages, self.page_bytes = page_size, 0, page_bytes(shapes, dtype)
        self.keys = [torch.zeros(0, *keys, dtype=dtype, device=device) for keys, _ in shapes]
        self.values = [torch.zeros(0, *values, dtype=dtype, device=device) for _, values in shapes]

    def enlarge(self, num_pages: int) -> None:
        """Make room for `num_pages` pages and keep what the pages hold. After an error, it can be called again."""
        for pool in (self.keys, self.values):
            for layer, old in enumerate(pool):
                if len(old) < num_pages:  # an earlier call may have run out of memory half way
                    pool[layer] = torch.zeros(num_pages, *old.shape[1:], dtype=old.dtype, device=old.device)
                    pool[layer][: len(old)] = old
        self.num_pages = num_pages


def page_bytes(shapes: list[PageShapes], dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return sum(prod(keys) + prod(values) for keys, values in shapes) * dtype.itemsize


def fixed_num_pages(spec: KVCacheSpec, page_size: int, page_bytes: int, free_bytes: float) -> int:
    """Pages for sequences in a pool of a fixed size: enough for a full batch of the longest, within limit and memory.

    The pool has one page more, for padding tokens. `spec.max_tokens` stands for the memory of so many tokens; padded
    heads and the page of the padding tokens count against it, so a few tokens less may fit. Of the device, the pool may
    take `free_bytes`. A page is one of all layers.
    """
    full = spec.max_batch_size * -(-spec.max_model_len // page_size)
    allowed, what = free_bytes, "of the device's memory"
    if spec.max_tokens is not None and (limit := spec.max_tokens * spec.bytes_per_token()) < free_bytes:
        allowed, what = limit, "(kv_memory)"
    num_pages = int(min(full, allowed // page_bytes - 1))
    if num_pages < 1:
        raise OutOfMemoryError(
            f"there is no room for a KV cache: it may take {allowed / 2**20:.2f} MiB {what}, and it needs at least two "
            f"pages of {page_size} tokens, which take {2 * page_bytes / 2**20:.2f} MiB. Raise kv_memory, or free "
            f"memory on the device"
        )
    return num_pages


def kv_bytes(kv_memory: str | float | None, device: torch.device, free: Callable[[], int] | None = None) -> int | None:
    """Bytes that `kv_memory` means: ``8GiB``, ``500MB``, a number of bytes, or a share of the free memory (``0.8``).

    The free memory is that of `device`, or as `free` says.
    """
    if kv_memory is None:
        return None
    match = re.fullmatch(r"([0-9.]+(?:e[+]?[0-9]+)?)\s*([KMGT]?i?B?)", str(kv_memory).strip())
    try:
        number, unit = float(match[1]), match[2]  # type: ignore[index]  # no match is caught below
        num_bytes = int(number * _UNITS[unit])
    except (TypeError, ValueError, KeyError, OverflowError):
        number, unit, num_bytes = 0.0, "", 0
    if number <= 0 or (unit and num_bytes < 1):
        raise ConfigError(
            f"kv_memory is {kv_memory!r}; give a size such as 8GiB or 500MB, or a share of the free memory such as 0.8"
        )
    if number <= 1 and not unit:
        return int(number * (free_bytes(device) if free is None else free()))
    return num_bytes


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device`, with the freed memory that PyTorch keeps."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    available: int = psutil.virtual_memory().available
    return available
