"""The promises of planned kernels and of pools of a fixed size: padded heads, tree masks, memory, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emssd_flashinfer.kernels import HEAD_DIMS, FlashInferKernels
from emssd_flashinfer.planned import padded_layer, write_kv
from emssd_flashinfer.tables import step_pages, tree_mask
from emssd_testing.oracle import DenseBackend
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec, PagedBackend
from emssd.attention.pages import PageTable
from emssd.attention.pool import KVPool, fixed_num_pages
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.errors import OutOfMemoryError
from emssd.sequences import Request, Row
from tests.support.reference_kernels import ReferenceAttention, ReferenceKernels, rerun
from tests.support.trees import ways

CPU = torch.device("cpu")
LAYER = LayerSpec(num_qo_heads=4, num_kv_heads=2, key_dim=10, value_dim=7, scale=0.3)
SPEC = KVCacheSpec((LAYER, replace(LAYER, sliding_window=4)), torch.float64, CPU, max_batch_size=4, max_model_len=64)


def allocated(spec: KVCacheSpec = SPEC, page_size: int = 16, **options: Any) -> PagedBackend:
    backend = PagedBackend(ReferenceKernels(**options), page_size=page_size, memory_fraction=1.0)
    assert not backend.unsupported(spec)
    backend.allocate(spec)
    return backend


def sequence(name: str, length: int, num_cached: int = 0) -> Row:
    return Row(Request(name, tuple(range(1, length + 1)), 100), num_cached=num_cached)


@pytest.mark.parametrize("window", [None, 3])
@given(seed=st.integers(0, 1000), parents=st.lists(st.integers(0, 99), min_size=2, max_size=6))
def test_each_path_of_a_tree_attends_as_if_it_were_a_sequence_alone(
    window: int | None, seed: int, parents: list[int]
) -> None:
    tree = tuple(choice % (node + 1) - 1 for node, choice in enumerate(parents))
    layer = replace(LAYER, sliding_window=window)
    spec, generator = replace(SPEC, layers=(layer,)), torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[torch.Tensor, ...]:
        shapes = ((layer.num_qo_heads, 10), (layer.num_kv_heads, 10), (layer.num_kv_heads, 7))
        return tuple(torch.randn(count, *shape, generator=generator, dtype=torch.float64) for shape in shapes)

    prompt, nodes = draw(5), draw(1 + len(tree))  # the newest token, then its tree
    draft = Draft(torch.zeros(len(tree), dtype=torch.int64), (0, len(tree)), tree)
    packed, table = pack([sequence("a", 6, 5)], draft), PageTable(3)
    table.reserve_step(packed)
    padded = padded_layer(layer, (16,))
    keys, values = torch.zeros(2, table.num_pages, 3, padded.num_kv_heads, 16, dtype=torch.float64)
    write_kv(keys, values, torch.tensor(table.slots("a", range(5))), *prompt[1:])
    write_kv(keys, values, (metadata := step_pages(table, packed).metadata()).slots, *nodes[1:])
    query = F.pad(nodes[0], (0, 6))
    attention, out = ReferenceKernels().attention(padded, masked=True), torch.empty_like(query)
    attention.plan(metadata, tree_mask(packed, window))
    attention.run(query, keys, values, out)
    out = out[..., :7]
    for node, way in enumerate(ways(tree)):
        chosen = torch.tensor([0] + [1 + step for step in way])
        dense = DenseBackend()
        dense.allocate(spec)
        alone = pack([sequence("a", 5 + len(chosen))], Draft.empty(1))
        whole = [torch.cat([old, new[chosen]]) for old, new in zip(prompt, nodes, strict=True)]
        expected = dense.forward(dense.plan(alone), 0, *whole)
        torch.testing.assert_close(out[1 + node], expected[-1], rtol=0, atol=1e-12)


@given(dim=st.integers(1, 256), other=st.integers(1, 256))
def test_heads_are_padded_to_the_next_that_the_kernels_take_with_the_true_scale(dim: int, other: int) -> None:
    layer = replace(LAYER, key_dim=dim, value_dim=other, scale=dim**-0.5)
    padded = padded_layer(layer, HEAD_DIMS)
    assert padded.key_dim == padded.value_dim == next(d for d in (64, 128, 256) if d >= max(dim, other))
    assert replace(padded, key_dim=dim, value_dim=other) == layer


class TestMemory:
    def test_the_pool_keeps_to_the_limit_and_is_allocated_once(self) -> None:
        spec = replace(SPEC, max_tokens=100)
        backend = allocated(spec, page_size=4)
        limit, page_bytes = 100 * spec.bytes_per_token(), 2 * 2 * (16 + 16) * 8 * 4  # padded heads, float64, 4 tokens
        assert backend.kv_usage.peak_pool == limit // page_bytes * page_bytes == 13 * page_bytes
        assert backend.fits({"a": 48})
        assert not backend.fits({"a": 45, "b": 1})  # 12 pages and one more
        backend.plan(pack([sequence("a", 5)], Draft.empty(1)))
        assert backend.kv_usage.held == 2 * page_bytes
        backend.release(["a"])
        assert (backend.kv_usage.held, backend.kv_usage.peak_held) == (0, 2 * page_bytes)
        assert backend.kv_usage.peak_pool == 13 * page_bytes

    @given(max_tokens=st.integers(20, 300), page_size=st.integers(1, 9), free=st.integers(10_000, 10**6))
    def test_no_limit_is_ever_exceeded(self, max_tokens: int, page_size: int, free: int) -> None:
        page_bytes = 500 * page_size
        spec = replace(SPEC, max_tokens=max_tokens)
        num_pages = fixed_num_pages(spec, page_size, page_bytes, free)
        assert (num_pages + 1) * page_bytes <= min(free, max_tokens * spec.bytes_per_token())
        assert num_pages <= 4 * -(-64 // page_size)

    def test_without_a_limit_a_full_batch_fits_or_what_memory_there_is(self) -> None:
        assert fixed_num_pages(SPEC, 16, 1000, float("inf")) == 4 * 4
        assert fixed_num_pages(replace(SPEC, max_model_len=65), 16, 1000, float("inf")) == 4 * 5
        assert fixed_num_pages(SPEC, 16, 1000, 7999) == 6

    @pytest.mark.parametrize(
        ("spec", "free", "what"),
        [
            (replace(SPEC, max_tokens=3), 1e9, r"0\.00 MiB \(kv_memory\)"),
            (SPEC, 2**21, r"2\.00 MiB of the device's memory"),
        ],
    )
    def test_no_room_for_one_page_is_refused_in_words(self, spec: KVCacheSpec, free: float, what: str) -> None:
        with pytest.raises(
            OutOfMemoryError, match=rf"may take {what}, and it needs at least two pages of 16 tokens, .*Raise kv_memory"
        ):
            fixed_num_pages(spec, 16, 2**21, free)

    def test_a_full_device_says_what_the_pool_takes_and_what_lowers_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        zeros = torch.zeros

        def full(count: int, *shape: int, **options: Any) -> torch.Tensor:
            if count:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return zeros(count, *shape, **options)

        monkeypatch.setattr(torch, "zeros", full)
        with pytest.raises(
            OutOfMemoryError, match=r"0\.08 GiB for 10000 pages of 16 tokens\. Lower kv_memory, .*batch_size"
        ):
            allocated(replace(SPEC, layers=(LAYER,), max_batch_size=1, max_model_len=160_000))

    def test_padding_goes_to_a_page_of_its_own(self) -> None:
        kernels, pool = ReferenceKernels(capture=rerun), KVPool([((4, 2, 16), (4, 2, 16))], 4, torch.float64, CPU)
        kernels.allocate(SPEC, pool)
        pool.enlarge(4)
        kernels.prepare()
        assert set(kernels._scrap_slots.tolist()) == {12, 13, 14, 15}
        assert len(kernels._scrap_slots) == 512, "one for each token of the largest recording"

    def test_recorded_steps_need_addresses_that_stay(self) -> None:
        with pytest.raises(AssertionError, match="pool of a fixed size"):
            PagedBackend(ReferenceKernels(capture=rerun)).allocate(SPEC)

    def test_a_pool_is_refused_before_kernels_are_compiled(self) -> None:
        class Slow(ReferenceKernels):
            def attention(self, *arguments: object, **options: object) -> ReferenceAttention:
                raise AssertionError("this takes minutes")

        with pytest.raises(OutOfMemoryError, match="no room for a KV cache"):
            PagedBackend(Slow(), memory_fraction=1.0).allocate(replace(SPEC, max_tokens=1))

    def test_bytes_count_keys_and_values_of_padded_heads(self) -> None:
        backend = PagedBackend(ReferenceKernels((8, 12)), page_size=3)
        assert backend.bytes_per_token(replace(SPEC, layers=(LAYER,), dtype=torch.float16)) == 2 * (12 + 12) * 2


class TestRefusals:
    def test_heads_that_no_kernel_takes(self) -> None:
        reasons = PagedBackend(ReferenceKernels((64, 128))).unsupported(
            replace(SPEC, layers=(LAYER, replace(LAYER, value_dim=129)))
        )
        assert reasons == ["it takes heads of up to 128 elements, and layer 1 has 129"]

    def test_heads_that_do_not_form_groups(self) -> None:
        (reason,) = PagedBackend(ReferenceKernels()).unsupported(
            replace(SPEC, layers=(replace(LAYER, num_qo_heads=3),))
        )
        assert "3 query heads over 2 key heads" in reason

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_precisions_that_the_kernels_lack(self, dtype: torch.dtype) -> None:
        kernels = FlashInferKernels()
        reasons = kernels.unsupported(replace(SPEC, dtype=dtype), 16)
        assert str(dtype).removeprefix("torch.") in reasons[0]
        assert "model.dtype=bfloat16" in reasons[0]
        assert "model.device=cuda" in reasons[1]
