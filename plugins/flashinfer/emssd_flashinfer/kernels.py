"""FlashInfer's paged attention; the only file that imports it."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.attention.planned import PlannedKernels
from emssd.attention.pool import KVPool
from emssd.attention.recorded import Capture
from emssd.attention.tables import FixedShape, PagedMetadata, largest_metadata
from emssd.attention.transfer import on_device
from emssd.errors import OutOfMemoryError, PluginError

__all__ = ["HEAD_DIMS", "FlashInferAttention", "FlashInferKernels"]

HEAD_DIMS = (64, 128, 256)
_FA3_MIN_TOKENS = 256  # FA3 works in tiles of 128 queries; with fewer than two it wastes work
_COMPILING_FAILED = (RuntimeError, OSError, subprocess.SubprocessError)


class FlashInferKernels(PlannedKernels):
    """FlashInfer's kernels.

    ``fa2`` is asked for by name. FlashInfer would choose ``fa3`` on Hopper; it takes no mask, does not split long KV,
    and works in tiles of 128 queries, while a row to verify has a few.

    Args:
        workspace_mib: MiB for partial results. All kernels share it, as they run one after another.
        prefill_kernel: ``fa2`` or ``fa3``, for steps with a row of 256 new tokens or more.
        capture, max_graph_tokens: see `emssd.attention.planned.PlannedKernels`.
    """

    def __init__(
        self, workspace_mib: int, prefill_kernel: str, capture: Capture | None = None, max_graph_tokens: int = 512
    ) -> None:
        super().__init__(HEAD_DIMS, capture, max_graph_tokens)
        self._workspace_mib = workspace_mib
        self._prefill_kernel = prefill_kernel

    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        reasons = []
        if spec.dtype not in (torch.float16, torch.bfloat16):
            dtype = str(spec.dtype).removeprefix("torch.")
            reasons.append(f"its kernels compute in float16 and bfloat16, not {dtype} (set model.dtype=bfloat16)")
        if spec.device.type != "cuda":
            reasons.append(f"its kernels run on CUDA, and the model is on {spec.device} (set model.device=cuda)")
        elif self._prefill_kernel == "fa3" and torch.cuda.get_device_capability(spec.device)[0] != 9:
            name = torch.cuda.get_device_name(spec.device)
            reasons.append(f"prefill_kernel=fa3 needs a Hopper GPU, not {name} (set backend.prefill_kernel=fa2)")
        return reasons + super().unsupported(spec, page_size)

    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        try:
            self._workspace = torch.empty(self._workspace_mib << 20, dtype=torch.uint8, device=spec.device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"backend 'flashinfer' cannot allocate its workspace of {self._workspace_mib} MiB on {spec.device}. "
                f"Lower backend.workspace_mib, or free memory on the device"
            ) from error
        super().allocate(spec, pool)

    def attention(
        self, layer: LayerSpec, *, masked: bool = False, shape: FixedShape | None = None
    ) -> FlashInferAttention:
        """See `emssd.attention.planned.PlannedKernels`. The first use of a kernel on a machine compiles it.

        Raises:
            PluginError: it cannot be compiled.
        """
        for_prompts = None
        if self._prefill_kernel == "fa3" and not masked and shape is None:
            for_prompts = self._wrapper("fa3", None)
        attention = FlashInferAttention(layer, self._spec.dtype, self._wrapper("fa2", shape), for_prompts)
        if masked:
            return attention
        try:
            # Compiles; and FlashInfer takes the first plan of a fixed shape for the largest there will be.
            attention.plan(largest_metadata(shape or FixedShape(1, 1, 1), self._pool.page_size))
            if for_prompts is not None:
                attention.plan(largest_metadata(FixedShape(1, _FA3_MIN_TOKENS, 0), self._pool.page_size))
        except _COMPILING_FAILED as error:
            raise PluginError(
                f"backend 'flashinfer' cannot prepare its kernels for heads of {layer.key_dim} elements in "
                f"{self._spec.dtype}: {_short(error)} See that CUDA_HOME is the folder of a CUDA toolkit "
                f"with nvcc and headers"
            ) from error
        return attention

    def _wrapper(self, name: str, shape: FixedShape | None) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        if shape is None:
            return BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=name)

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._workspace.device)

        return BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffer(shape.num_rows + 1),
            paged_kv_indptr_buf=buffer(shape.num_rows + 1),
            paged_kv_indices_buf=buffer(shape.num_pages),
            paged_kv_last_page_len_buf=buffer(shape.num_rows),
            backend=name,
        )


class FlashInferAttention:
    """An `emssd.attention.planned.PagedAttention`: a wrapper of FlashInfer's, and maybe another one for prompts.

    Args:
        layer: shape and rules.
        dtype: of queries, keys, values and output.
        wrapper: a `BatchPrefillWithPagedKVCacheWrapper`.
        for_prompts: another wrapper, for steps with long rows.
    """

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, wrapper: Any, for_prompts: Any = None) -> None:
        self._layer = layer
        self._dtype = dtype
        self._wrapper = wrapper
        self._for_prompts = for_prompts
        self._active = wrapper
        self._num_tokens = 0
        self._planned: Any = None  # a torch.cuda.Event, which torch does not annotate

    def plan(self, metadata: PagedMetadata, mask: torch.Tensor | None = None) -> None:
        layer, device = self._layer, self._wrapper.device
        long = self._for_prompts is not None and metadata.max_q_len >= _FA3_MIN_TOKENS
        self._active = self._for_prompts if long else self._wrapper
        self._num_tokens = metadata.num_tokens
        if self._planned is not None and not self._planned.query():
            # A plan lies in pinned memory until the device has fetched it; an early next plan would overwrite it. This
            # waits only if a draft model plans its next token before the last one is done.
            self._planned.synchronize()
        self._active.plan(
            metadata.qo_indptr,
            metadata.kv_indptr,
            on_device(metadata.kv_indices, device, torch.int32),
            metadata.kv_last_page_len,
            layer.num_qo_heads,
            layer.num_kv_heads,
            layer.key_dim,
            metadata.page_size,
            head_dim_vo=layer.value_dim,
            custom_mask=None if mask is None else mask.to(device, non_blocking=True),
            causal=mask is None,
            sm_scale=layer.scale,
            window_left=layer.sliding_window - 1 if layer.sliding_window is not None and mask is None else -1,
            logits_soft_cap=layer.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            max_token_per_sequence=metadata.max_q_len,
        )
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        self._planned.record(torch.cuda.current_stream(device))

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        # A recorded graph holds only addresses and shapes of heads; the device reads the number of queries from the
        # plan. So the slices of the recorded step bind no later step.
        self._active.run(query[: self._num_tokens], (keys, values), out=out[: self._num_tokens])


def _short(error: Exception) -> str:
    """The last line of a compiler's message that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if "error" in line.lower()]
    text = (lines or str(error).strip().splitlines() or [type(error).__name__])[-1]
    return text if text.endswith(".") else text + "."
