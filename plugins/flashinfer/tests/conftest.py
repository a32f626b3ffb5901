"""FlashInfer with its compiled kernels replaced by plain PyTorch, or a stand-in where it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_flashinfer.tables import PagedMetadata, TreeMask

from emssd.attention import LayerSpec
from tests.support.reference_kernels import ReferenceAttention

INSTALLED = find_spec("flashinfer") is not None
NUM_SMS = 132  # of an H100


class FakeEvent:
    """Counts what would be waits of the host for the device."""

    recorded: list[FakeEvent] = []  # noqa: RUF012  # emptied by the fixture
    waited: list[FakeEvent] = []  # noqa: RUF012  # as above

    def record(self, stream: object) -> None:
        FakeEvent.recorded.append(self)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        FakeEvent.waited.append(self)


class FakeModule:
    """Stands for the compiled module: keeps what it is planned with, and attends by the reference."""

    def __init__(self, name: str, options: tuple[Any, ...]) -> None:
        self.name, self.options = name, options
        self.plans: list[tuple[Any, ...]] = []

    def plan(self, *arguments: Any) -> list[int]:
        self.plans.append(arguments)
        for table in arguments[3:6]:
            assert table.device.type == "cpu", "planning reads tables on the host"
            assert table.dtype == torch.int32
        if arguments[11]:
            assert arguments[16:18] == (-1, False), "padding of a recorded plan is told to stop only where KV is split"
        num_bytes, _ = self.workspace_size(arguments[0], *arguments[3:])
        assert num_bytes <= arguments[0].numel(), (
            f"a workspace of {arguments[0].numel()} bytes, and it takes {num_bytes}"
        )
        return [0]

    def workspace_size(
        self,
        device_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        graph: bool,
        head_dim: int,
        *rest: Any,
    ) -> tuple[int, int]:
        """``PrefillSplitQOKVIndptr`` of FlashInfer's ``scheduler.cuh``, in as many words."""
        group, most = num_qo_heads // num_kv_heads, 2 * NUM_SMS // num_kv_heads
        packed = [length * group for length in qo_indptr.diff().tolist()]
        pages = [max(length, 1) for length in kv_indptr.diff().tolist()]
        longest = (num_rows - batch_size + 1) * group if graph else sum(packed) // batch_size
        tile = (128 if head_dim < 256 else 64) if longest > 64 else 64 if longest > 16 else 16
        low, high = max(128 // page_size, 1), max(pages)
        while low < high:
            middle = (low + high) // 2
            blocks = sum(-(-q // tile) * -(-kv // middle) for q, kv in zip(packed, pages, strict=True))
            low, high = (middle + 1, high) if blocks > most else (low, middle)
        blocks = sum(-(-q // tile) * -(-kv // low) for q, kv in zip(packed, pages, strict=True))
        if graph:
            blocks = max(most, -(-num_rows * group // tile) + batch_size - 1)
        elif low >= max(pages):
            return 0, 0
        return num_qo_heads * blocks * tile * (head_dim + 1) * 4, 0

    def paged_run(self, *arguments: Any) -> None:
        (_, _, _, query, keys, values, qo_indptr, kv_indptr, kv_indices, last_page_len, out, _, mask_mode, layout,
         window_left, _, packed_mask, mask_indptr, *_) = arguments  # fmt: skip
        softcap, scale = arguments[22:24]
        assert layout == 0, "pages are [page_size, heads, dim]"
        assert (mask_mode == 2) == (packed_mask is not None)
        assert mask_mode in (1, 2)
        rows = kv_indptr.tolist()
        metadata = PagedMetadata(
            qo_indptr, kv_indptr, kv_indices[: rows[-1]], last_page_len, torch.empty(0), keys.shape[1]
        )
        window = None if window_left < 0 else window_left + 1
        layer = LayerSpec(
            query.shape[1], keys.shape[2], query.shape[2], values.shape[3], scale, window, softcap or None
        )
        assert packed_mask is None or window_left < 0
        mask = None if packed_mask is None else TreeMask(packed_mask.numpy(), mask_indptr.numpy())
        attention = ReferenceAttention(layer, mask is not None)
        attention.plan(metadata, mask)
        attention.run(query, keys, values, out)


class StandIn:
    """Replaces the used parts of ``BatchPrefillWithPagedKVCacheWrapper`` where FlashInfer is not installed."""

    get_module: Callable[..., FakeModule]

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        **buffers: torch.Tensor,
    ) -> None:
        self.device, self._name, self._graph = workspace.device, backend, use_cuda_graph
        names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        masks = ("custom_mask_buf", "mask_indptr_buf")
        assert set(buffers) in ((set(names), {*names, *masks}) if use_cuda_graph else (set(),))
        self._tables = tuple(buffers[name] for name in names) if buffers else ()
        self._masks = tuple(buffers[name] for name in masks) if masks[0] in buffers else None
        self._workspace = workspace
        self._most: int | None = None
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **rules: Any,
    ) -> None:
        tables, total = (qo_indptr, kv_indptr, kv_indices, last_page_len), int(qo_indptr[-1])
        assert rules["max_token_per_sequence"] == int(qo_indptr.diff().max())
        if self._graph:
            self._most = self._most or total
            assert total <= self._most, "more queries than the first plan had"
            for buffer, table in zip(self._tables, tables, strict=True):
                assert len(buffer) == len(table) or table is kv_indices, "the number of rows is fixed"
                buffer[: len(table)].copy_(table)
        else:
            self._tables = tables
        self._custom_mask_buf, self._mask_indptr_buf = self._masks or (None, None)
        if (bits := rules["packed_custom_mask"]) is not None:
            kv_lens = PagedMetadata(*tables, torch.empty(0), page_size).kv_lens
            sizes = [q * kv for q, kv in zip(qo_indptr.diff().tolist(), kv_lens, strict=True)]
            in_bits = torch.tensor(
                [0, *accumulate(sizes)], dtype=torch.int32
            )  # as FlashInfer counts for bits of others
            if self._masks is not None:
                self._masks[0][: len(bits)].copy_(bits)
                self._masks[1].copy_(in_bits)
            else:
                assert not self._graph, "a mask needs buffers"
                self._custom_mask_buf, self._mask_indptr_buf = bits, in_bits
        self._rules, self._total = rules, total
        self._module = StandIn.get_module(self._name, rules["q_data_type"], head_dim, rules["head_dim_vo"])
        self._module.plan(
            self._workspace, None, None, qo_indptr, kv_indptr, last_page_len, self._most or total, len(qo_indptr) - 1,
            num_qo_heads, num_kv_heads, page_size, self._graph, head_dim, rules["head_dim_vo"], rules["causal"],
            rules["window_left"], rules.get("fixed_split_size") or -1, rules.get("disable_split_kv", False), 0, 0,
        )  # fmt: skip

    def workspace_size(self, *arguments: Any, **rules: Any) -> tuple[int, int]:
        qo_indptr, kv_indptr, _, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size = arguments
        module = StandIn.get_module(self._name, rules["q_data_type"], head_dim, rules["head_dim_vo"])
        return module.workspace_size(
            self._workspace, qo_indptr, kv_indptr, last_page_len, self._most or int(qo_indptr[-1]), len(qo_indptr) - 1,
            num_qo_heads, num_kv_heads, page_size, self._graph, head_dim,
        )  # fmt: skip

    def run(self, query: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        assert len(query) == len(out) == self._total, "FlashInfer wants exactly the planned queries"
        mode = 2 if self._custom_mask_buf is not None else int(self._rules["causal"])
        softcap, scale = self._rules["logits_soft_cap"] or 0.0, self._rules["sm_scale"]
        self._module.paged_run(
            None, None, None, query, *pools, *self._tables, out, None, mode, 0, self._rules["window_left"], None,
            self._custom_mask_buf, self._mask_indptr_buf, None, None, None, None, softcap, scale,
        )  # fmt: skip


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, use_module: Callable[..., None]) -> list[FakeModule]:
    """A module for each plan, in order."""
    made: list[FakeModule] = []
    empty = torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*arguments, **options)

    def get_module(name: str, *options: Any) -> FakeModule:
        made.append(FakeModule(name, options))
        return made[-1]

    if not INSTALLED:
        stand_in = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandIn)
        monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    else:
        prefill = import_module("flashinfer.prefill")
        monkeypatch.setattr(prefill, "_get_cache_alibi_slopes_buf", lambda heads, device: None)
    use_module(get_module)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=NUM_SMS)
    )
    FakeEvent.recorded.clear()
    FakeEvent.waited.clear()
    return made


@pytest.fixture
def use_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Gives FlashInfer, or what stands in for it, a function in the place of what compiles and loads."""

    def use(get_module: Callable[..., Any]) -> None:
        if INSTALLED:
            monkeypatch.setattr(import_module("flashinfer.prefill"), "get_batch_prefill_module", get_module)
        else:
            monkeypatch.setattr(StandIn, "get_module", get_module, raising=False)

    return use


@pytest.fixture
def events(modules: list[FakeModule]) -> type[FakeEvent]:
    """The events recorded, and those waited for."""
    return FakeEvent
