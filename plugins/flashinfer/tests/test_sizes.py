"""FlashInfer's arithmetic: tiles of queries, rows of recordings, and the workspace, with the figures of real models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_flashinfer.kernels import FlashInferKernels
from emssd_flashinfer.recorded import Staging, StaticInputs
from emssd_flashinfer.sizes import eager_workspace, query_tile, recorded_rows
from emssd_flashinfer.tables import FixedShape
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.attention.pool import KVPool
from emssd.errors import OutOfMemoryError
from tests.support.tiers import looped

CPU, MIB = torch.device("cpu"), 2**20
H100 = 132  # multiprocessors, as an H200
GROUPS = st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16])


@looped(
    ("packed_q_len", "head_dim", "tile"),
    [(1, 128, 16), (16, 128, 16), (17, 128, 64), (64, 64, 64), (65, 64, 128), (65, 256, 64), (16, 256, 16)],
)
def test_the_tile_is_flashinfers(packed_q_len: int, head_dim: int, tile: int) -> None:
    assert query_tile(packed_q_len, head_dim) == tile


@given(size=st.integers(1, 600), batch=st.integers(1, 200), group=GROUPS, dim=st.sampled_from([64, 128, 256]))
def test_a_recording_has_rows_for_every_step_and_no_more_than_the_tile_of_a_full_batch_takes(
    size: int, batch: int, group: int, dim: int
) -> None:
    rows, enough = recorded_rows(size, batch, group, dim), min(size, batch)
    tile = query_tile(-(-size // enough) * group, dim)
    assert enough <= rows <= size
    assert query_tile((size - rows + 1) * group, dim) <= tile
    if rows > enough:
        assert query_tile((size - rows + 2) * group, dim) > tile, "one row less would do"


LAYER = LayerSpec(32, 32, 128, 128, 128**-0.5)
SPEC = KVCacheSpec((LAYER,), torch.float16, CPU, max_batch_size=256, max_model_len=64)


def allocated() -> FlashInferKernels:
    kernels = FlashInferKernels()
    kernels.allocate(SPEC, KVPool([], 16, SPEC.dtype, CPU))
    return kernels


def static(num_tokens: int, num_rows: int) -> StaticInputs:
    shape = FixedShape(num_rows, num_tokens, num_pages=1024, max_kv_len=600)
    return StaticInputs(shape, Staging(StaticInputs.num_bytes(shape), CPU))


def size_of(kernels: FlashInferKernels) -> float:
    return kernels._workspace.numel() / MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the real kernels")
class TestWorkspace:
    def test_it_grows_before_the_first_plan_that_needs_more(self, modules: list[Any]) -> None:
        kernels = allocated()
        eager = size_of(kernels)
        assert eager * MIB == eager_workspace(32, 32, 128, H100)
        kernels.attention(LAYER)
        kernels.attention(LAYER, static=static(64, 8))
        assert size_of(kernels) == eager
        kernels.attention(LAYER, static=static(66, 17))  # 18 tiles where there were 16
        assert size_of(kernels) == 2 * eager, "few buffers are left behind"
        kernels.attention(LAYER, static=static(512, 256))
        assert round(size_of(kernels)) == 522

    def test_masked_recordings_need_as_much(self, modules: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = allocated()
        monkeypatch.setattr(kernels, "_mask_of", lambda layer: Staging(MIB, CPU))
        kernels.attention(LAYER, masked=True, static=static(512, 256))
        assert round(size_of(kernels)) == 522

    def test_without_room_the_options_that_lower_it_are_named(
        self, modules: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels = allocated()

        def full(*arguments: object, **options: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        wrapper = SimpleNamespace(workspace_size=lambda *_, **__: (522 * MIB, 0), device=CPU)
        monkeypatch.setattr(kernels, "_wrapper", lambda *_: wrapper)
        monkeypatch.setattr(torch, "empty", full)
        with pytest.raises(OutOfMemoryError, match=r"workspace of 522 MiB on cpu .*Lower backend\.max_graph_tokens"):
            kernels.attention(LAYER, static=static(512, 256))
