"""Ragged verification with paged attention kernels: page tables and metadata here, arithmetic in the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, KVUsage, LayerSpec, PackedInputs, StepPlan
from emssd.attention.memory import free_bytes
from emssd.attention.paged import (
    FixedShape,
    PagedAttention,
    PagedKernels,
    largest_metadata,
    page_metadata,
    reserve_pages,
    tree_mask,
)
from emssd.attention.pages import PageTable
from emssd.attention.transfer import on_device
from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd_flashinfer.graphs import Capture, Compute, StaticInputs, ladder, rung
from emssd_flashinfer.pool import KVPool, kernel_layer, num_pool_pages, token_bytes

__all__ = ["FlashInferBackend", "FlashInferPlan"]


@dataclass(slots=True)
class FlashInferPlan(StepPlan):
    """One step.

    Attributes:
        slots: ``[n]`` int64, where the new KV goes.
        attention: of each layer, planned for this step; layers of the same rules share it.
        outputs: of a recorded step, by layer rules, ``[max_tokens, heads, dim]`` where attention writes; else ``None``.
    """

    slots: torch.Tensor
    attention: list[PagedAttention]
    outputs: dict[LayerSpec, torch.Tensor] | None = None


class FlashInferBackend(AttentionBackend):
    """One paged KV pool, allocated once; one write position per sequence; no padded input but that of CUDA graphs.

    Args:
        kernels: what computes attention: FlashInfer's on CUDA, or `emssd.testing.paged.ReferenceKernels` anywhere.
        page_size, memory_fraction, max_graph_tokens: see `FlashInferConfig`.
        capture: records forward passes of small steps; ``None`` runs all steps as they are.
    """

    def __init__(
        self,
        kernels: PagedKernels,
        *,
        page_size: int = 16,
        memory_fraction: float = 0.8,
        capture: Capture | None = None,
        max_graph_tokens: int = 512,
    ) -> None:
        for name, value in (("page_size", page_size), ("max_graph_tokens", max_graph_tokens)):
            if value < 1:
                raise ConfigError(f"backend.{name} is {value}; it must be at least 1")
        if not 0 < memory_fraction <= 1:
            raise ConfigError(f"backend.memory_fraction is {memory_fraction}; it must be above 0 and at most 1")
        self._kernels = kernels
        self._memory_fraction = memory_fraction
        self._table = PageTable(page_size)
        self._peak_held = 0
        self._capture = capture
        self._ladder = ladder(max_graph_tokens) if capture is not None else ()
        self._attention: dict[tuple[LayerSpec, bool, int | None], PagedAttention] = {}
        self._recordings: dict[int, Compute] = {}

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        reasons = self._kernels.unsupported(spec)
        largest = self._kernels.head_dims[-1]
        dims = [max(layer.key_dim, layer.value_dim) for layer in spec.layers]
        if max(dims) > largest:
            index = dims.index(max(dims))
            reasons.append(f"it takes heads of up to {largest} elements, and layer {index} has {dims[index]}")
        for index, layer in enumerate(spec.layers):
            if layer.num_qo_heads % layer.num_kv_heads:
                reasons.append(
                    f"layer {index} has {layer.num_qo_heads} query heads over {layer.num_kv_heads} key heads, and "
                    f"query heads must be a multiple of key heads"
                )
                break
        return reasons

    def allocate(self, spec: KVCacheSpec) -> None:
        page_size = self._table.page_size
        self._spec = spec
        self._layers = tuple(kernel_layer(layer, self._kernels.head_dims) for layer in spec.layers)
        self._kernels.allocate(spec, page_size)
        page_bytes = token_bytes(self._layers, spec.dtype) * page_size
        num_pages = num_pool_pages(spec, page_size, page_bytes, self._free_bytes())
        self._pool = KVPool(self._layers, num_pages, page_size, spec.dtype, spec.device)
        self._table.max_pages = num_pages
        if self._ladder:
            most = self._ladder[-1]
            self._static = StaticInputs(most, spec.device)
            self._outputs = {
                layer: torch.zeros(most, layer.num_qo_heads, layer.value_dim, dtype=spec.dtype, device=spec.device)
                for layer in set(self._layers)
            }
        for layer in set(self._layers):  # so that kernels which cannot be made are known before the first step
            self._attend(layer, masked=False, size=None)

    def bytes_per_token(self, spec: KVCacheSpec) -> int:
        return token_bytes(tuple(kernel_layer(layer, self._kernels.head_dims) for layer in spec.layers), spec.dtype)

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return self._table.fits(kv_lens.values())

    def plan(self, packed: PackedInputs, trees: Draft | None = None) -> FlashInferPlan:
        """As in the interface; with `trees`, rows end with the nodes of these trees and attend along them.

        The caller gives tree nodes their depth's positions, and keeps no KV of theirs: see `tree_mask`.
        """
        reserve_pages(self._table, packed)
        self._peak_held = max(self._peak_held, self._table.num_used * self._pool.page_bytes)
        metadata = page_metadata(self._table, packed)
        masked = trees is not None and not trees.is_chain
        size = None if masked else rung(self._ladder, packed.num_tokens)
        if size is not None:
            metadata = metadata.with_rows(self._num_rows(size))
        planned: dict[LayerSpec, PagedAttention] = {}
        for layer in self._layers:
            if layer not in planned:
                planned[layer] = self._attend(layer, masked, size)
                mask = tree_mask(packed, trees, layer.sliding_window) if masked and trees is not None else None
                planned[layer].plan(metadata, mask)
        attention = [planned[layer] for layer in self._layers]
        if size is not None:
            return self._recorded_plan(packed, metadata.slots, attention, size)
        return FlashInferPlan(
            input_ids=packed.input_ids.unsqueeze(0),
            position_ids=packed.position_ids.unsqueeze(0),
            logits_to_keep=packed.logit_rows,
            logit_index=None,
            num_padding=0,
            slots=on_device(metadata.slots, self._spec.device),
            attention=attention,
        )

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(plan, FlashInferPlan)
        rules, spec = self._layers[layer], self._spec.layers[layer]
        self._pool.write(layer, plan.slots, key, value)
        if rules.key_dim > spec.key_dim:
            query = F.pad(query, (0, rules.key_dim - spec.key_dim))
        out = query.new_empty(query.shape) if plan.outputs is None else plan.outputs[rules][: len(query)]
        plan.attention[layer].run(query, self._pool.keys[layer], self._pool.values[layer], out)
        return out[..., : spec.value_dim]

    def commit(self, kept: Kept) -> int:
        for request_id, kv_len in zip(kept.request_ids, kept.kv_lens, strict=True):
            self._table.truncate(request_id, kv_len)
        return 0

    def release(self, request_ids: Iterable[str]) -> None:
        self._table.release(request_ids)

    @property
    def kv_usage(self) -> KVUsage:
        return KVUsage(self._table.num_used * self._pool.page_bytes, self._peak_held, self._pool.num_bytes)

    def _attend(self, layer: LayerSpec, masked: bool, size: int | None) -> PagedAttention:
        """The kernel for `layer`'s rules, eager or of a recorded size; made when first asked for."""
        name = (layer, masked, size)
        if name not in self._attention:
            shape = None if size is None else self._shape(size)
            self._attention[name] = self._kernels.attention(layer, masked=masked, shape=shape)
        return self._attention[name]

    def _shape(self, size: int) -> FixedShape:
        """What a recording of `size` tokens must hold."""
        shape = FixedShape(self._num_rows(size), size, num_pages=0)
        most = max(self._pool.num_pages, len(largest_metadata(shape, self._table.page_size).kv_indices))
        return replace(shape, num_pages=most)

    def _num_rows(self, size: int) -> int:
        """Rows of a recording of `size` tokens; every row has a token, so there are never more rows than tokens."""
        return min(self._spec.max_batch_size, size)

    def _recorded_plan(
        self, packed: PackedInputs, slots: torch.Tensor, attention: list[PagedAttention], size: int
    ) -> FlashInferPlan:
        """A step in the static tensors, padded to `size` tokens and to as many rows of logits."""
        static, num_padding, num_logits = self._static, size - packed.num_tokens, len(packed.logit_rows)
        static.fill(packed, slots, self._pool.scrap_slots(num_padding))
        if num_padding:
            for out in self._outputs.values():  # attention leaves them as a step before did, of rows that may be NaN
                out[packed.num_tokens : size].zero_()
        return FlashInferPlan(
            input_ids=static.input_ids[:size].unsqueeze(0),
            position_ids=static.position_ids[:size].unsqueeze(0),
            logits_to_keep=static.logit_rows[:size],
            logit_index=None if num_logits == size else static.counting[:num_logits],
            num_padding=num_padding,
            replay=partial(self._replay, size),
            slots=static.slots[:size],
            attention=attention,
            outputs=self._outputs,
        )

    def _replay(self, size: int, compute: Compute) -> torch.Tensor:
        assert self._capture is not None
        if size not in self._recordings:
            self._recordings[size] = self._capture(compute)
        return self._recordings[size]()

    def _free_bytes(self) -> float:
        """Memory that the pool may take where the spec sets no limit."""
        if self._spec.device.type != "cuda":
            return float("inf")
        return free_bytes(self._spec.device) * self._memory_fraction
