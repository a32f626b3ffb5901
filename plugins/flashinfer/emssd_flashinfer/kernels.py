"""FlashInfer's paged attention; the only file that imports it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from emssd.attention import KVCacheSpec, KVPool, LayerSpec, on_device
from emssd.errors import OutOfMemoryError, PluginError
from emssd.model import CompiledPasses
from emssd_flashinfer.planned import PlannedKernels
from emssd_flashinfer.recorded import Capture, Staging, StaticInputs
from emssd_flashinfer.sizes import eager_workspace, recorded_rows
from emssd_flashinfer.tables import FixedShape, PagedMetadata, TreeMask, largest_metadata

__all__ = ["FlashInferKernels"]

HEAD_DIMS = (64, 128, 256)
_BUILD_FAILED = "Ninja build failed"  # so begins FlashInfer's message
_MIB = 1 << 20
# `fa2` reads no lengths of KV beside the page tables, but FlashInfer's Python looks for the longest, row by row, in a
# tensor of them: 5 µs a row, absent ones included. So it gets a tensor of one.
_NOT_READ = torch.ones(1, dtype=torch.int32)


class FlashInferKernels(PlannedKernels):
    """FlashInfer's kernels.

    ``fa2`` is asked for by name. FlashInfer would choose ``fa3`` on Hopper; it takes no mask, does not split long KV,
    and works in tiles of 128 queries, while a row to verify has a few. All kernels share one workspace for partial
    results, as they run one after another. The arguments are those of `PlannedKernels`.
    """

    def __init__(
        self, capture: Capture | None = None, max_graph_tokens: int = 512, passes: CompiledPasses | None = None
    ) -> None:
        super().__init__(HEAD_DIMS, capture, max_graph_tokens, passes)

    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        reasons = []
        if spec.dtype not in (torch.float16, torch.bfloat16):
            dtype = str(spec.dtype).removeprefix("torch.")
            reasons.append(f"its kernels compute in float16 and bfloat16, not {dtype} (set model.dtype=bfloat16)")
        if spec.device.type != "cuda":
            reasons.append(f"its kernels run on CUDA, and the model is on {spec.device} (set model.device=cuda)")
        return reasons + super().unsupported(spec, page_size)

    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        super().allocate(spec, pool)
        num_sms = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self._workspace = torch.empty(0, dtype=torch.uint8, device=spec.device)
        self._masks: dict[LayerSpec, Staging] = {}
        for layer in self._rules:
            sizes = layer.num_qo_heads, layer.num_kv_heads, layer.key_dim, num_sms
            self._reserve(eager_workspace(*sizes), "a step that is not recorded")

    def num_rows(self, size: int) -> int:
        groups = [(layer.num_qo_heads // layer.num_kv_heads, layer.key_dim) for layer in self._rules]
        return max(recorded_rows(size, self._spec.max_batch_size, *group) for group in groups)

    def attention(
        self, layer: LayerSpec, *, masked: bool = False, static: StaticInputs | None = None
    ) -> FlashInferAttention:
        """The first use of a kernel on a machine compiles it."""
        staging = self._mask_of(layer) if masked and static is not None else None
        attention = FlashInferAttention(layer, self._spec.dtype, self._wrapper(static, staging), staging)
        if masked and static is None:
            return attention
        shape = static.shape if static is not None else FixedShape(1, 1, 1)
        # Compiles; and FlashInfer takes the first plan of a recording for the largest there will be.
        largest = largest_metadata(shape, self._pool.page_size)
        bits = [np.zeros(-(-(length**2) // 8), dtype=np.uint8) for length in largest.kv_lens]  # a plan reads none
        mask = TreeMask.of(bits) if masked else None
        try:
            what = f"a recorded step of {shape.num_tokens} tokens"
            if static is not None and self._reserve(attention.workspace_size(largest), what):
                attention = FlashInferAttention(layer, self._spec.dtype, self._wrapper(static, staging), staging)
            attention.plan(largest, mask)
        except RuntimeError as error:
            if _BUILD_FAILED not in str(error):
                raise
            raise PluginError(
                f"backend 'flashinfer' cannot compile its kernels for heads of {layer.key_dim} elements in "
                f"{self._spec.dtype}: {_short(error)} See that CUDA_HOME is the folder of a CUDA toolkit "
                f"with nvcc and headers"
            ) from error
        return attention

    def _reserve(self, num_bytes: int, what: str) -> bool:
        """Have a workspace of at least so many bytes for `what`. Returns whether it is a new one.

        Recordings go on with the workspace that they were made with. So that few are left behind, it at least doubles.
        """
        have = self._workspace.numel()
        if num_bytes <= have:
            return False
        num_bytes = max(num_bytes, 2 * have)
        try:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._spec.device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"backend 'flashinfer' cannot allocate a workspace of {-(-num_bytes // _MIB)} MiB on "
                f"{self._spec.device} for {what}. Lower backend.max_graph_tokens, backend.memory_fraction or "
                f"kv_memory, or free memory on the device"
            ) from error
        return True

    def _mask_of(self, layer: LayerSpec) -> Staging:
        """The mask of a step for these rules, which recordings of all sizes read: where rows begin, and then bits."""
        if layer not in self._masks:
            largest = self._static_of(self.recorded_sizes[-1]).shape
            num_bits = largest.num_tokens * largest.max_kv_len
            num_bytes = _begin_of_bits(self.num_rows(largest.num_tokens)) + num_bits // 8 + largest.num_rows
            self._masks[layer] = Staging(num_bytes, self._spec.device)
        return self._masks[layer]

    def _wrapper(self, static: StaticInputs | None = None, mask: Staging | None = None) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        make = partial(BatchPrefillWithPagedKVCacheWrapper, self._workspace, "NHD", backend="fa2")
        if static is None:
            return make()
        tables, shape = static.tables, static.shape
        buffers = {
            "qo_indptr_buf": tables.qo_indptr,
            "paged_kv_indptr_buf": tables.kv_indptr,
            "paged_kv_indices_buf": tables.kv_indices,
            "paged_kv_last_page_len_buf": tables.kv_last_page_len,
        }
        if mask is not None:  # with these, FlashInfer attends by the mask and by nothing else
            buffers["custom_mask_buf"] = mask.memory[_begin_of_bits(shape.num_rows) :]
            buffers["mask_indptr_buf"] = mask.memory[: 4 * (shape.num_rows + 1)].view(torch.int32)
        return make(use_cuda_graph=True, **buffers)


class FlashInferAttention:
    """A `PagedAttention`: a wrapper of FlashInfer's. Masks of recorded steps come through `for_masks`."""

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, wrapper: Any, for_masks: Staging | None = None) -> None:
        self.layer, self._dtype, self._wrapper, self._for_masks = layer, dtype, wrapper, for_masks
        self._num_tokens = 0
        self._planned: Any = None  # a torch.cuda.Event, which torch does not annotate

    def plan(self, metadata: PagedMetadata, mask: TreeMask | None = None) -> None:
        device, self._num_tokens = self._wrapper.device, metadata.num_tokens
        if self._planned is None:
            self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        elif not self._planned.query():
            # A plan lies in pinned memory until the device has fetched it; an early next plan would overwrite it. This
            # waits only if a draft model plans its next token before the last one is done.
            self._planned.synchronize()
        bits = None
        if mask is not None and self._for_masks is not None:
            begin = _begin_of_bits(len(metadata.kv_last_page_len))
            bits = self._for_masks.memory[begin : begin + len(mask.bits)]
        elif mask is not None:
            bits = on_device(torch.from_numpy(mask.bits), device, torch.uint8)
        # Never `disable_split_kv=True`: the blocks that pad a recorded plan are told to stop only where KV is split.
        self._wrapper.plan(
            *self._tables(metadata),
            **self._rules(causal=mask is None),
            packed_custom_mask=bits,
            sm_scale=self.layer.scale,
            max_token_per_sequence=metadata.max_q_len,
            seq_lens=_NOT_READ,
        )
        if mask is not None:
            self._write(mask, len(metadata.kv_last_page_len))
        self._planned.record(torch.cuda.current_stream(device))

    def _write(self, mask: TreeMask, num_rows: int) -> None:
        """Write the mask after the plan: FlashInfer counts in bits there where rows begin, and its kernel in bytes."""
        staging = self._for_masks
        if staging is None:
            self._wrapper._mask_indptr_buf = on_device(torch.from_numpy(mask.indptr), self._wrapper.device, torch.int32)
            return
        host, begin = staging.buffers[staging.next()].numpy(), _begin_of_bits(num_rows)
        indptr = host[: 4 * (num_rows + 1)].view(np.int32)
        indptr[: len(mask.indptr)], indptr[len(mask.indptr) :] = mask.indptr, mask.indptr[-1]
        host[begin : begin + len(mask.bits)] = mask.bits
        staging.move(begin + len(mask.bits))
        staging.done()

    def workspace_size(self, metadata: PagedMetadata) -> int:
        """Bytes for partial results that a causal step takes."""
        num_bytes, _ = self._wrapper.workspace_size(*self._tables(metadata), **self._rules(causal=True))
        return int(num_bytes)

    def _tables(self, metadata: PagedMetadata) -> tuple[Any, ...]:
        layer, device = self.layer, self._wrapper.device
        indices = on_device(metadata.kv_indices, device, torch.int32)
        tables = metadata.qo_indptr, metadata.kv_indptr, indices, metadata.kv_last_page_len
        return *tables, layer.num_qo_heads, layer.num_kv_heads, layer.key_dim, metadata.page_size

    def _rules(self, causal: bool) -> dict[str, Any]:
        window = self.layer.sliding_window if causal else None
        return {
            "head_dim_vo": self.layer.value_dim,
            "causal": causal,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.layer.softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        # A recorded graph holds only addresses and shapes of heads; the device reads the number of queries from the
        # plan. So the slices of the recorded step bind no later step.
        self._wrapper.run(query[: self._num_tokens], (keys, values), out=out[: self._num_tokens])


def _begin_of_bits(num_rows: int) -> int:
    """After where so many rows begin, at a multiple of 16 bytes."""
    return -(-4 * (num_rows + 1) // 16) * 16


def _short(error: Exception) -> str:
    """The last line of a compiler's message that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if "error" in line.lower()]
    text = (lines or str(error).strip().splitlines() or [type(error).__name__])[-1]
    return text if text.endswith(".") else text + "."
