"""`PagedBackend`: a KV cache in pages, written once for all kernels; and `PagedKernels`, what such kernels offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import torch

from emssd.attention.interface import AttentionBackend, Kept, KVCacheSpec, KVUsage, LayerSpec, NativeStep, StepPlan
from emssd.attention.packed import PackedInputs, on_device
from emssd.attention.pages import PageTable
from emssd.attention.pool import KVPool, PageShapes, fixed_num_pages, free_bytes, page_bytes
from emssd.errors import OutOfMemoryError

__all__ = ["PagedBackend", "PagedKernels"]


class PagedKernels(ABC):
    """A family of attention kernels over paged KV: the layout of its pages, and what it computes from them.

    One object serves one `PagedBackend`.

    Attributes:
        takes_trees, takes_sinks, takes_devices, batch_invariant, recorded_sizes: see `AttentionBackend`.
    """

    takes_trees: bool = False
    takes_sinks: bool = False
    takes_devices: bool = False
    batch_invariant: bool = False
    recorded_sizes: tuple[int, ...] = ()

    @abstractmethod
    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        """Reasons, in words, why the kernels cannot serve `spec` in such pages; empty means that they can."""

    @abstractmethod
    def page_shapes(self, layer: LayerSpec, dtype: torch.dtype, page_size: int) -> PageShapes:
        """The shapes of a page of keys and of a page of values, as the kernels read them."""

    @abstractmethod
    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        """Take the memory that the kernels need besides `pool`, which has no pages yet. Called once."""

    def plan_chain(self, packed: PackedInputs, lengths: Seq[int], table: PageTable) -> list[StepPlan]:
        """See `AttentionBackend.plan_chain`. The pages of all passes are reserved already."""
        return []

    def prepare(self) -> None:
        """Do what takes long, such as compiling. Called once, after a pool of a fixed size has its memory."""

    @abstractmethod
    def plan(self, packed: PackedInputs, table: PageTable) -> StepPlan:
        """Once a step: prepare what `forward` reads. The pages of the new tokens are reserved already."""

    @abstractmethod
    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Once a layer: store the new keys and values in the pool, then attend. See `AttentionBackend.forward`."""

    def native_step(self, plan: StepPlan) -> NativeStep | None:
        """See `AttentionBackend.native_step`."""
        return None

    def take_sinks(self, layers: Seq[LayerSpec]) -> bool:
        """See `AttentionBackend.take_sinks`."""
        return False

    def forget_steps(self) -> None:
        """See `AttentionBackend.forget_steps`."""

    def move(self, pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the keys or the values of some tokens to other slots. All are read before the first is written.

        Args:
            pages: one of the pool's tensors, ``[num_pages, *shape of a page]``; here a page is ``[page_size, …]``.
            sources, targets: ``[n]`` int64 slots, ``page * page_size + offset``.
        """
        slots = pages.view(-1, *pages.shape[2:])
        slots.index_copy_(0, targets, slots.index_select(0, sources))


class PagedBackend(AttentionBackend):
    """Sequences hold whole pages of one pool. To roll back a draft is to give back pages; nothing is copied.

    Sequences that begin alike share pages, if the spec asks for it; see `emssd.attention.pages.PageTable`.

    Args:
        kernels: what computes attention; of several, the first that can serve the model.
        page_size: tokens per page.
        memory_fraction: allocate the pool at once, for a full batch of the longest sequences, within this fraction of
            the free device memory. ``None`` lets the pool grow with what the sequences hold.
    """

    def __init__(self, *kernels: PagedKernels, page_size: int = 16, memory_fraction: float | None = None) -> None:
        self._choice = kernels
        self.takes_trees = any(family.takes_trees for family in kernels)
        self.takes_sinks = any(family.takes_sinks for family in kernels)
        self.takes_devices = all(family.takes_devices for family in kernels)
        self._memory_fraction = memory_fraction
        self._table = PageTable(page_size)
        self._peak_held = 0

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        return self._serving(spec).unsupported(spec, self._table.page_size)

    def allocate(self, spec: KVCacheSpec) -> None:
        page_size = self._table.page_size
        self._kernels = self._serving(spec)
        self.batch_invariant, self.recorded_sizes = self._kernels.batch_invariant, self._kernels.recorded_sizes
        self._pool = KVPool(self._page_shapes(self._kernels, spec), page_size, spec.dtype, spec.device)
        self.prefix_unit = page_size if spec.prefix_caching else 0
        self._kernels.allocate(spec, self._pool)
        if self._memory_fraction is not None:
            self._table.max_pages = self._fix_pool(spec, self._memory_fraction)
        elif spec.max_tokens is not None:
            self._table.max_pages = spec.max_tokens * spec.bytes_per_token() // self._pool.page_bytes
        self._kernels.prepare()

    def bytes_per_token(self, spec: KVCacheSpec) -> int:
        return page_bytes(self._page_shapes(self._serving(spec), spec), spec.dtype) // self._table.page_size

    def _page_shapes(self, kernels: PagedKernels, spec: KVCacheSpec) -> list[PageShapes]:
        return [kernels.page_shapes(layer, spec.dtype, self._table.page_size) for layer in spec.layers]

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._table.fits(kv_lens)

    def plan(self, packed: PackedInputs) -> StepPlan:
        self._table.reserve_step(packed)
        self._have_reserved()
        return self._kernels.plan(packed, self._table)

    def plan_chain(self, packed: PackedInputs, lengths: Seq[int]) -> list[StepPlan]:
        self._table.reserve_step(packed)
        for request_id, kv_len, length in zip(packed.request_ids, packed.kv_lens, lengths, strict=True):
            self._table.reserve(request_id, kv_len + length - 1)
        self._have_reserved()
        return self._kernels.plan_chain(packed, lengths, self._table)

    def _have_reserved(self) -> None:
        """Rows have other pages."""
        self._follow_table()
        self._peak_held = max(self._peak_held, self._table.num_used * self._pool.page_bytes)

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return self._kernels.forward(plan, layer, query, key, value)

    def native_step(self, plan: StepPlan) -> NativeStep | None:
        return self._kernels.native_step(plan)

    def commit(self, kept: Kept) -> None:
        self._move(kept)
        self._table.truncate_all(zip(kept.request_ids, kept.kv_lens, strict=True))

    def release(self, request_ids: Iterable[str]) -> None:
        self._table.release(request_ids)

    def adopt_prefix(self, request_id: str, tokens: Seq[int], num_cached: int = 0) -> int:
        return self._table.adopt(request_id, tokens, num_cached) if self.prefix_unit else num_cached

    def publish_prefix(self, request_id: str, tokens: Seq[int]) -> None:
        if self.prefix_unit:
            self._table.publish(request_id, tokens)

    def forget_prefixes(self) -> None:
        self._table.forget()

    def take_sinks(self, layers: Seq[LayerSpec]) -> bool:
        return self._kernels.take_sinks(layers)

    def forget_steps(self) -> None:
        self._kernels.forget_steps()

    @property
    def kv_usage(self) -> KVUsage:
        size = self._pool.page_bytes
        return KVUsage(self._table.num_used * size, self._peak_held, self._pool.num_pages * size)

    def _serving(self, spec: KVCacheSpec) -> PagedKernels:
        """The first kernels that can serve `spec`; the last if none can."""
        able = [family for family in self._choice if family.takes_trees or not spec.trees]
        able = [family for family in able if family.takes_sinks or not spec.has_sinks]
        *first, last = able or self._choice
        return next((family for family in first if not family.unsupported(spec, self._table.page_size)), last)

    def _move(self, kept: Kept) -> None:
        """Move the KV of accepted tree nodes to where it would be if they had been a chain."""
        if not kept.sources or not (moves := kept.moves()):
            return
        sources, targets = list[int](), list[int]()
        for request_id, _, after in moves:
            self._table.make_own(request_id, after[0])
        self._follow_table()
        for request_id, before, after in moves:
            sources += self._table.slots(request_id, before)
            targets += self._table.slots(request_id, after)
        if sources and self._pool.keys:  # a model without attention has none
            index = on_device([*sources, *targets], self._pool.keys[0].device)
            for pages in (*self._pool.keys, *self._pool.values):
                self._kernels.move(pages, index[: len(sources)], index[len(sources) :])

    def _follow_table(self) -> None:
        """Give new pages their memory, and fill those that take the place of shared ones."""
        if self._pool.num_pages < self._table.num_pages:
            spare = self._pool.num_pages + self._pool.num_pages // 8  # so that copying stays rare
            self._pool.enlarge(max(self._table.num_pages, min(spare, self._table.max_pages or spare)))
        for source, target in self._table.copies:
            for pages in (*self._pool.keys, *self._pool.values):
                pages[target] = pages[source]
        self._table.copies.clear()

    def _fix_pool(self, spec: KVCacheSpec, fraction: float) -> int:
        """Allocate the whole pool. Returns the pages for sequences; the last page is for padding tokens."""
        pool = self._pool
        # Elsewhere than on a GPU, a full batch is allocated whatever it takes.
        free = free_bytes(spec.device) * fraction if spec.device.type == "cuda" else float("inf")
        num_pages = fixed_num_pages(spec, pool.page_size, pool.page_bytes, free)
        try:
            pool.enlarge(num_pages + 1)
        except torch.OutOfMemoryError as error:
            pool.keys.clear()
            pool.values.clear()
            raise OutOfMemoryError(
                f"the KV cache does not fit on {spec.device}: it takes "
                f"{(num_pages + 1) * pool.page_bytes / 2**30:.2f} GiB for {num_pages} pages of {pool.page_size} "
                f"tokens. Lower kv_memory, backend.memory_fraction, batch_size or model.max_model_len"
            ) from error
        return num_pages
