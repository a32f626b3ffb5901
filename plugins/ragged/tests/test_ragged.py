"""The ragged backend's own promises: whole pages and no more, a pool that grows, no padding at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emssd_ragged.backend import ragged_backend
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import Kept, KVCacheSpec, LayerSpec, PagedBackend
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from tests.support.spies import failing
from tests.support.strategies import step_histories

LAYER = LayerSpec(num_qo_heads=2, num_kv_heads=1, key_dim=3, value_dim=2, scale=1.0)
SPEC = KVCacheSpec((LAYER, LAYER), torch.float64, torch.device("cpu"), max_batch_size=8, max_model_len=512)
TOKEN_BYTES = 2 * (3 + 2) * 8
# Bytes of a page. The fused kernel holds values in vectors of 16 dimensions, and keys in pairs of bfloat16 dimensions.
PAGES = {
    "torch-1": (1, "torch", TOKEN_BYTES),
    "torch-3": (3, "torch", 3 * TOKEN_BYTES),
    "torch-16": (16, "torch", 16 * TOKEN_BYTES),
    "fused": (16, "fused", 2 * 16 * (3 + 16) * 8),
}


def allocated(page_size: int, kernels: str = "torch", spec: KVCacheSpec = SPEC) -> PagedBackend:
    backend = ragged_backend(page_size, kernels)
    assert backend.unsupported(spec) == []
    backend.allocate(spec)
    return backend


def sequences(*lengths: int) -> list[Row]:
    return [Row(Request(str(i), tuple(range(length)), 100)) for i, length in enumerate(lengths)]


def pages(lengths: list[int], page_size: int) -> int:
    return sum(-(-length // page_size) for length in lengths)


@pytest.mark.parametrize(("page_size", "kernels", "page_bytes"), PAGES.values(), ids=PAGES)
@given(lengths=st.lists(st.integers(1, 40), min_size=3, max_size=3), history=step_histories(3))
def test_held_memory_is_the_whole_pages_of_the_tokens_to_the_byte(
    page_size: int, kernels: str, page_bytes: int, lengths: list[int], history: list[list[tuple[int, int]]]
) -> None:
    backend, rows = allocated(page_size, kernels), sequences(*lengths)
    peak = 0
    for step in history:
        draft = Draft.from_chains([[0] * drafted for drafted, _ in step])
        plan = backend.plan(packed := pack(rows, draft))
        fed = [len(row.tokens) + drafted for row, (drafted, _) in zip(rows, step, strict=True)]
        peak = max(peak, pages(fed, page_size) * page_bytes)
        assert backend.kv_usage.held == pages(fed, page_size) * page_bytes
        assert backend.kv_usage.peak_held == peak
        assert plan.input_ids.numel() == packed.num_tokens
        for row, (_, accepted) in zip(rows, step, strict=True):
            row.advance([0] * (accepted + 1), None, num_drafted=accepted, num_accepted=accepted)
        kept = [row.num_cached for row in rows]
        backend.commit(Kept(("0", "1", "2"), tuple(kept)))
        assert backend.kv_usage.padding == 0
        assert backend.kv_usage.held == pages(kept, page_size) * page_bytes
    backend.release(["1"])
    assert backend.kv_usage.held == pages([kept[0], kept[2]], page_size) * page_bytes
    backend.release(["0", "2", "never seen"])
    assert backend.kv_usage.held == 0
    assert backend.kv_usage.peak_held == peak


@pytest.mark.parametrize(
    ("dtype", "page_bytes"), [(torch.float32, 16 * (3 + 16) * 4), (torch.bfloat16, 16 * (4 + 16) * 2)]
)
def test_the_fused_kernel_counts_the_padding_of_narrow_heads(dtype: torch.dtype, page_bytes: int) -> None:
    backend = allocated(16, "fused", replace(SPEC, layers=(LAYER,), dtype=dtype))
    backend.plan(pack(sequences(17), Draft.empty(1)))
    assert backend.kv_usage.held == backend.kv_usage.peak_pool == 2 * page_bytes


def test_a_limit_is_kept_in_bytes_whatever_the_layout_of_a_page() -> None:
    """100 tokens of 5 numbers fill six pages of 16 tokens, and one of those that hold 19 numbers for each token."""
    limited = replace(SPEC, max_tokens=100)
    plain, padded = allocated(16, "torch", limited), allocated(16, "fused", limited)
    assert plain.fits({"a": 80, "b": 16})
    assert not plain.fits({"a": 81, "b": 16})
    assert padded.fits({"a": 16})
    assert not padded.fits({"a": 17})
    padded.plan(pack(sequences(16), Draft.empty(1)))
    assert padded.kv_usage.peak_pool <= 100 * TOKEN_BYTES


@pytest.mark.parametrize(("kernels", "page_size"), [("torch", 4), ("torch", 16), ("fused", 16)])
def test_pool_grows_with_the_sequences_and_keeps_what_is_in_it(kernels: str, page_size: int) -> None:
    backend, rows = allocated(page_size, kernels), sequences(4)
    page_bytes = {"torch": page_size * TOKEN_BYTES, "fused": 2 * 16 * (3 + 16) * 8}[kernels]
    assert backend.kv_usage.peak_pool == 0
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(count, heads, dim, generator=generator, dtype=torch.float64)

    value = draw(4, 1, 2)
    plan = backend.plan(pack(rows, Draft.empty(1)))
    backend.forward(plan, 0, draw(4, 2, 3), torch.zeros(4, 1, 3, dtype=torch.float64), value)
    small = backend.kv_usage.peak_pool
    assert small == page_bytes
    rows[0].num_cached = 4
    rows[0].extend([0] * 100)
    plan = backend.plan(pack(rows, Draft.empty(1)))
    zeros = torch.zeros(100, 1, 3, dtype=torch.float64)
    out = backend.forward(plan, 0, draw(100, 2, 3), zeros, torch.zeros(100, 1, 2, dtype=torch.float64))
    # Equal keys give equal weights, so a query sees the mean; only the old values are not zero.
    torch.testing.assert_close(out[-1], value.sum(dim=0).expand(2, 2) / 104, atol=1e-12, rtol=0)
    assert backend.kv_usage.peak_pool == pages([104], page_size) * page_bytes
    backend.release(["0"])
    assert backend.kv_usage.peak_pool == pages([104], page_size) * page_bytes


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("at", range(4))
def test_where_memory_runs_out_half_way_the_next_step_finds_a_whole_pool(
    kernels: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, (row,) = allocated(16, kernels), sequences(40)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing(torch.zeros, torch.OutOfMemoryError(), at))
        with pytest.raises(torch.OutOfMemoryError):
            backend.plan(pack([row], Draft.empty(1)))
    backend.plan(pack([row], Draft.empty(1)))
    assert {len(layer) for pool in (backend._pool.keys, backend._pool.values) for layer in pool} == {3}


def test_released_pages_are_used_again_before_the_pool_grows() -> None:
    backend = allocated(4)
    for serial in range(20):
        row = Row(Request(str(serial), (0,) * 17, 9))
        backend.plan(pack([row], Draft.empty(1)))
        backend.release([row.request_id])
    assert backend.kv_usage.peak_pool == 5 * 4 * TOKEN_BYTES


def test_a_long_prompt_beside_short_rows_attends_in_a_group_of_its_own() -> None:
    backend, rows = allocated(4), sequences(3, 17, 16, 40)
    groups = backend.plan(pack(rows, Draft.empty(4))).attention.groups
    assert [group.num_rows for group in groups] == [2, 1, 1]
    assert [tuple(group.mask.positions.shape) for group in groups] == [(2, 16), (1, 17), (1, 40)]
