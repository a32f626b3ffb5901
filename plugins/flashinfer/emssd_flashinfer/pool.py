"""The KV pool: pages of all layers, allocated once, with heads padded to what the kernels take."""

from __future__ import annotations

from dataclasses import replace

import torch

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.errors import OutOfMemoryError

__all__ = ["KVPool", "kernel_layer", "num_pool_pages", "token_bytes"]


def kernel_layer(layer: LayerSpec, head_dims: tuple[int, ...]) -> LayerSpec:
    """`layer` with heads as long as a kernel takes them; its scale stays the true one.

    Zeros behind a key or a query change no score, and columns behind a value are cut off the output.
    """
    dim = min(dim for dim in head_dims if dim >= max(layer.key_dim, layer.value_dim))
    return replace(layer, key_dim=dim, value_dim=dim)


def token_bytes(layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
    """Bytes of KV that one token takes over `layers`."""
    return KVCacheSpec(layers, dtype, torch.device("cpu"), 1, 1).bytes_per_token()


def num_pool_pages(spec: KVCacheSpec, page_size: int, page_bytes: int, free_bytes: float) -> int:
    """How many pages sequences get: those of a full batch of the longest ones, if limit and memory allow it.

    `spec.max_tokens` stands for the memory of so many tokens; padded heads and the page of the padding tokens are paid
    from it, so a little fewer may fit.

    Args:
        spec: of the cache.
        page_size: tokens per page.
        page_bytes: of one page, all layers, as the pool holds it.
        free_bytes: of the device that may be taken.

    Raises:
        OutOfMemoryError: not even one page.
    """
    full = spec.max_batch_size * -(-spec.max_model_len // page_size)
    allowed, what = free_bytes, "of the device's memory"
    if spec.max_tokens is not None and (limit := spec.max_tokens * spec.bytes_per_token()) < free_bytes:
        allowed, what = limit, "(kv_memory)"
    num_pages = int(min(full, allowed // page_bytes - 1))  # the last is that of padding tokens
    if num_pages < 1:
        raise OutOfMemoryError(
            f"backend 'flashinfer' has no room for a KV cache: it may take {allowed / 2**20:.2f} MiB {what}, and the "
            f"two pages of {page_size} tokens that are the least take {2 * page_bytes / 2**20:.2f} MiB. Raise "
            f"kv_memory, or free memory on the device"
        )
    return num_pages


class KVPool:
    """Per layer ``[pages + 1, page_size, num_kv_heads, dim]`` keys and values.

    The last page belongs to no sequence: padding tokens write there, and nobody reads it.

    Args:
        layers: of the model, as the kernels see them.
        num_pages: for sequences.
        page_size: tokens per page.
        dtype, device: of the pool.

    Raises:
        OutOfMemoryError: the device has not so much memory.
    """

    def __init__(
        self, layers: tuple[LayerSpec, ...], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = token_bytes(layers, dtype) * page_size
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        try:
            for layer in layers:
                for pool in (self.keys, self.values):
                    shape = (num_pages + 1, page_size, layer.num_kv_heads, layer.key_dim)
                    pool.append(torch.zeros(shape, dtype=dtype, device=device))
        except torch.OutOfMemoryError as error:
            self.keys.clear()
            self.values.clear()
            raise OutOfMemoryError(
                f"backend 'flashinfer' cannot allocate its KV cache on {device}: {self.num_bytes / 2**30:.2f} GiB for "
                f"{num_pages} pages of {page_size} tokens. Lower kv_memory, backend.memory_fraction, batch_size or "
                f"model.max_model_len"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return (self.num_pages + 1) * self.page_bytes

    def scrap_slots(self, count: int) -> torch.Tensor:
        """``[count]`` int64 slots of the page that nobody reads."""
        return self.num_pages * self.page_size + torch.arange(count) % self.page_size

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key [n, heads, key_dim]`` and ``value [n, heads, value_dim]`` at ``slots [n]``.

        Kernels choose by the mask between a score and minus infinity, and then multiply every value of a tile, if only
        by 0. So a key may be NaN, which reaches nobody who does not see it, and a value may not. A head with a value
        that is not finite is stored as a key of NaN: whoever sees it gets NaN, and nobody else.
        """
        if key.shape == value.shape:
            key = torch.add(key, value, alpha=0)
        else:
            key = key + 0 * torch.linalg.vector_norm(value, float("inf"), dim=-1, keepdim=True)
        for pool, new in ((self.keys[layer], key), (self.values[layer], value.nan_to_num(0.0, 0.0, 0.0))):
            pool.view(-1, *pool.shape[2:])[..., : new.shape[2]].index_copy_(0, slots, new)
