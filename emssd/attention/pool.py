"""The pages of a KV cache as tensors."""

from __future__ import annotations

from math import prod

import torch

from emssd.attention.interface import KVCacheSpec
from emssd.errors import OutOfMemoryError

__all__ = ["KVPool", "PageShapes", "fixed_num_pages", "page_bytes"]

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
