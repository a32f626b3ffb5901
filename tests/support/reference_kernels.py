"""Reference for paged attention kernels: plain PyTorch that reads the same metadata and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from emssd_flashinfer.planned import PlannedKernels
from emssd_flashinfer.recorded import Capture, Compute, StaticInputs
from emssd_flashinfer.tables import PagedMetadata, TreeMask, step_pages, tree_mask

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.attention.pages import PageTable
from emssd.attention.pool import KVPool
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.model.compile.inductor import CompiledPasses
from emssd.sequences import Request, Row


class ReferenceKernels(PlannedKernels):
    """Paged attention for any device and dtype, row by row and in float64; slow and easy to check.

    Args:
        head_dims, capture, max_graph_tokens, passes: see `emssd_flashinfer.planned.PlannedKernels`.
    """

    def __init__(
        self,
        head_dims: tuple[int, ...] = (4, 16, 64, 128, 256),
        capture: Capture | None = None,
        max_graph_tokens: int = 512,
        passes: CompiledPasses | None = None,
    ) -> None:
        super().__init__(head_dims, capture, max_graph_tokens, passes)

    def attention(
        self, layer: LayerSpec, *, masked: bool = False, static: StaticInputs | None = None
    ) -> ReferenceAttention:
        return ReferenceAttention(layer, masked, static)


class ReferenceAttention:
    """An `emssd_flashinfer.planned.PagedAttention`. It asserts what a real kernel would misread silently."""

    def __init__(self, layer: LayerSpec, masked: bool, static: StaticInputs | None = None) -> None:
        self._layer = layer
        self._masked = masked
        self._static = static

    def plan(self, metadata: PagedMetadata, mask: TreeMask | None = None) -> None:
        assert (mask is not None) == self._masked, "kernels with and without a mask are different kernels"
        for tensor in (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_last_page_len):
            assert tensor.device.type == "cpu", "a table on the device would make the host wait"
            assert tensor.dtype == torch.int32, "kernels read int32 tables"
        assert metadata.kv_indices.dtype == torch.int32, "kernels read int32 tables"
        num_rows = len(metadata.kv_last_page_len)
        assert len(metadata.qo_indptr) == len(metadata.kv_indptr) == num_rows + 1
        assert int(metadata.kv_indptr[-1]) == len(metadata.kv_indices)
        if self._static is not None:
            shape, tables = self._static.shape, self._static.tables
            assert num_rows == shape.num_rows, f"{num_rows} rows in a kernel for {shape.num_rows}"
            assert metadata.num_tokens <= shape.num_tokens
            assert len(metadata.kv_indices) <= shape.num_pages
            assert mask is None or max(metadata.kv_lens) <= shape.max_kv_len
            # A recorded kernel reads the tables on the device.
            metadata = PagedMetadata(
                tables.qo_indptr, tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len, tables.slots,
                metadata.page_size,
            )  # fmt: skip
        self._metadata, self._mask = metadata, mask

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        metadata = self._metadata
        assert query.shape == out.shape
        assert metadata.page_size == keys.shape[1] == values.shape[1]
        if self._static is None:
            assert len(query) == metadata.num_tokens, f"{len(query)} queries where {metadata.num_tokens} were planned"
        else:
            assert metadata.num_tokens <= len(query)
        qo_indptr, kv_indptr = metadata.qo_indptr.tolist(), metadata.kv_indptr.tolist()
        for row, last_page_len in enumerate(metadata.kv_last_page_len.tolist()):
            start, stop = qo_indptr[row : row + 2]
            pages = metadata.kv_indices[kv_indptr[row] : kv_indptr[row + 1]].long().to(keys.device)
            q_len, kv_len = stop - start, max(len(pages) - 1, 0) * metadata.page_size + last_page_len
            if q_len == 0:
                continue
            assert 1 <= last_page_len <= metadata.page_size
            assert q_len <= kv_len, "KV of the new tokens belongs to the row"
            seen = self._causal(q_len, kv_len) if self._mask is None else seen_of(self._mask, row, q_len, kv_len)
            out[start:stop] = self._attend(
                query[start:stop], keys[pages].flatten(0, 1)[:kv_len], values[pages].flatten(0, 1)[:kv_len], seen
            )

    def _causal(self, q_len: int, kv_len: int) -> torch.Tensor:
        """``[q_len, kv_len]`` bool: queries are the last tokens."""
        key, query = torch.arange(kv_len), torch.arange(kv_len - q_len, kv_len).unsqueeze(1)
        window = self._layer.sliding_window
        return (key <= query) & (key > query - window) if window is not None else key <= query

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """``query [q_len, heads, dim]`` over ``keys, values [kv_len, kv_heads, dim]``."""
        layer, kv_heads = self._layer, self._layer.num_kv_heads
        grouped = query.double().view(len(query), kv_heads, layer.num_qo_heads // kv_heads, -1)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.double()) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * (scores / layer.softcap).tanh()
        weights = scores.masked_fill(~seen.to(scores.device), float("-inf")).softmax(dim=-1)
        return torch.einsum("hgqk,khd->qhgd", weights, values.double()).flatten(1, 2).to(query.dtype)


def seen_of(mask: TreeMask, row: int, q_len: int, kv_len: int) -> torch.Tensor:
    """``[q_len, kv_len]`` bool: what the queries of a row see."""
    bits = np.unpackbits(mask.bits[mask.indptr[row] :], count=q_len * kv_len, bitorder="little")
    return torch.from_numpy(bits).bool().view(q_len, kv_len)


def rerun(compute: Compute) -> Compute:
    """Stands for the capture of a CUDA graph: the "recording" runs the recorded function again, on its static buffers.

    A function that reads anything else gives the result of an old step, as a replayed graph would.
    """
    return compute


def tree_attention(kernels: PlannedKernels, spec: KVCacheSpec, page_size: int) -> torch.Tensor:
    """``[num_tokens, heads, dim]`` of the spec's one layer, for random queries of two rows with trees and random KV."""
    (layer,), table = spec.layers, PageTable(page_size)
    draft = Draft(torch.zeros(7, dtype=torch.int64), (0, 4, 7), (-1, 0, 0, -1, -1, 0, 1))
    packed = pack([Row(Request("a", tuple(range(21)), 9)), Row(Request("b", (4, 5), 9))], draft)
    table.reserve_step(packed)
    generator, pages = torch.Generator().manual_seed(0), (table.num_pages, page_size, layer.num_kv_heads, layer.key_dim)
    shapes = ((packed.num_tokens, layer.num_qo_heads, layer.key_dim), pages, pages)
    inputs = [torch.rand(shape, generator=generator).to(spec.device, spec.dtype) for shape in shapes]
    out = torch.full_like(inputs[0], torch.nan)
    kernels.allocate(spec, KVPool([], page_size, spec.dtype, spec.device))
    attention = kernels.attention(layer, masked=True)
    attention.plan(step_pages(table, packed).metadata(), tree_mask(packed, layer.sliding_window))
    attention.run(*inputs, out)
    return out
