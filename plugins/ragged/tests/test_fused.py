"""The fused kernel: within rounding of dense float64 attention, and each query's bits depend on its own row alone.

Oracle: `dense`, softmax attention over one row in float64, from the definition. `expected` says how far rounding may
take the kernel from it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from emssd_ragged.backend import ragged_backend
from emssd_ragged.fused import why_not_fused
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec
from plugins.ragged.tests.fused_cache import (
    BLOCK,
    GARBAGE,
    QKV,
    ROUNDING,
    Cache,
    dtypes,
    layers,
    num_threads,
    random_qkv,
)
from tests.support.tiers import looped

Ranges = list[tuple[int, int]]

# The steps of each row, of drafts or of prompts; the first row may begin with what fills a block of the kernel or two.
steps_of_rows = st.lists(
    st.lists(st.integers(1, 9) | st.integers(10, 70), min_size=1, max_size=3), min_size=1, max_size=4
)
beginnings = st.just([]) | st.lists(st.integers(BLOCK - 20, BLOCK + 20), min_size=1, max_size=1) | st.just([2 * BLOCK])
histories = st.builds(lambda beginning, rows: [beginning + rows[0], *rows[1:]], beginnings, steps_of_rows)


def feed(cache: Cache, rows: Seq[QKV], ranges: dict[int, tuple[int, int]], **options: Any) -> dict[int, torch.Tensor]:
    """Feed tokens ``start:stop`` of some rows in one call. Returns each row's ``[stop - start, heads, dim]``."""
    new = {str(row): [tensor[start:stop] for tensor in rows[row]] for row, (start, stop) in ranges.items()}
    return dict(zip(ranges, cache.step(new, [stop for _, stop in ranges.values()], **options), strict=True))


def dense(
    layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens of one row in float64: the output, the mean of ``|value|`` by the same weights, and the roundings.

    The last is how far a score is off, in units of a rounding: ``[tokens, heads]``.
    """
    group, count = layer.num_qo_heads // layer.num_kv_heads, torch.arange(len(query))
    query, key, value = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
    key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
    scores = query @ key.mT * layer.scale
    # A sum of n products is off by n roundings of the sum of their magnitudes; scale, cap and shift add a few more.
    off = (layer.key_dim + 2) * (query.abs() @ key.abs().mT) * abs(layer.scale)
    if layer.softcap is not None:
        off = off + 4 * scores.abs()
        scores = layer.softcap * (scores / layer.softcap).tanh()
    seen = count[:, None] >= count
    if layer.sliding_window is not None:
        seen = seen & (count > count[:, None] - layer.sliding_window)
    off = (off + 4 * scores.abs()).masked_fill(~seen, 0).amax(dim=2)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=2)
    return (weights @ value).transpose(0, 1), (weights @ value.abs()).transpose(0, 1), off.transpose(0, 1)


def expected(layer: LayerSpec, dtype: torch.dtype, qkv: QKV) -> tuple[torch.Tensor, torch.Tensor]:
    """The right output, ``[tokens, heads, value_dim]``, and how far rounding can take the kernel's from it.

    Errors of scores (of a weight and of the sum that it is divided by) and of the exponential turn into relative errors
    of weights, and a sum of n terms is off by n roundings of the sum of magnitudes. In bfloat16 all this is computed in
    float32; then weights are rounded once, and so are outputs.
    """
    out, magnitude, off = dense(layer, *qkv)
    unit = ROUNDING[torch.float32 if dtype is torch.bfloat16 else dtype]
    terms = 2 * len(out) + 8 * (1 + len(out) // BLOCK)
    relative = torch.expm1(2 * unit * off).unsqueeze(-1) + unit * terms
    if dtype is torch.bfloat16:
        return out, magnitude * (relative + 1.01 * ROUNDING[dtype]) + 1.01 * ROUNDING[dtype] * out.abs()
    return out, magnitude * relative + unit * out.abs()


@pytest.fixture(autouse=True)
def _kernels(kernels: None) -> None:
    """All of these tests need them."""


@settings(max_examples=settings.default.max_examples // 3)
@given(layer=layers(), dtype=dtypes, steps=histories, strided=st.booleans(), seed=st.integers(0, 2**16),
       garbage=st.sampled_from(GARBAGE))  # fmt: skip
def test_every_step_of_any_rows_equals_dense_attention(
    layer: LayerSpec, dtype: torch.dtype, steps: list[list[int]], strided: bool, seed: int, garbage: float
) -> None:
    cache = Cache(layer, dtype, garbage=garbage)
    rows = [random_qkv(layer, dtype, sum(row), seed + number) for number, row in enumerate(steps)]
    cuts = [list(pairwise([0, *accumulate(row)])) for row in steps]
    oracle = [expected(layer, dtype, qkv) for qkv in rows]
    for number in range(max(map(len, cuts))):
        now = {row: ranges[number] for row, ranges in enumerate(cuts) if number < len(ranges)}
        for row, out in feed(cache, rows, now, strided=strided).items():
            part = slice(*now[row])
            right, allowed = (tensor[part] for tensor in oracle[row])
            assert out.dtype is dtype
            error = (out.double() - right).abs()
            assert bool((error <= allowed).all()), (  # false for NaN too
                f"row {row}, tokens {part}: off by {error.max():.3g}, {(error / allowed).max():.3g} times the bound"
            )


@looped("window", [1, 15, 16, 17, 511, 512, 513, 700, 1100])
def test_a_window_ends_at_its_token_in_contexts_of_several_blocks(window: int) -> None:
    """Values are 1 for one token and 0 for all others, so that one token more or less is no rounding."""
    layer = LayerSpec(num_qo_heads=1, num_kv_heads=1, key_dim=2, value_dim=1, scale=1.0, sliding_window=window)
    cache, row, marked = Cache(layer, torch.float32), random_qkv(layer, torch.float32, 1100, 0), 300
    row[1].zero_()
    row[2].zero_()
    row[2][marked] = 1
    out = torch.cat([feed(cache, [row], {0: part})[0] for part in ((0, 900), (900, 1100))]).flatten()
    positions = torch.arange(1100)
    sees = (positions >= marked) & (positions < marked + window)
    torch.testing.assert_close(out, sees / (positions + 1).clamp(max=window))


def in_pieces(data: st.DataObject, kv_len: int) -> Ranges:
    cuts = data.draw(st.lists(st.integers(1, kv_len), max_size=4, unique=True), label="cuts")
    return list(pairwise(sorted({0, *cuts, kv_len})))


@given(data=st.data(), layer=layers(), dtype=st.sampled_from([torch.bfloat16, torch.float32]), seed=st.integers(0, 999),
       kv_lens=st.lists(st.integers(1, 80) | st.integers(BLOCK - 5, BLOCK + 60), min_size=2, max_size=4))  # fmt: skip
def test_a_query_has_the_same_bits_alone_token_by_token_chunked_and_in_a_batch_with_one_or_two_threads(
    data: st.DataObject, layer: LayerSpec, dtype: torch.dtype, seed: int, kv_lens: list[int]
) -> None:
    cache, names = Cache(layer, dtype), [str(row) for row in range(len(kv_lens))]
    rows = [random_qkv(layer, dtype, kv_len, seed + number) for number, kv_len in enumerate(kv_lens)]
    with num_threads(1):
        whole = feed(cache, rows, {row: (0, kv_len) for row, kv_len in enumerate(kv_lens)})
    alone = data.draw(st.integers(0, len(kv_lens) - 1), label="alone")
    cache.forget(*names)
    single = [feed(cache, rows, {alone: (token, token + 1)})[alone] for token in range(kv_lens[alone])]
    assert torch.equal(torch.cat(single), whole[alone])
    cache.forget(*names)
    pieces = {row: in_pieces(data, kv_len) for row, kv_len in enumerate(kv_lens)}
    parts: dict[int, list[torch.Tensor]] = {row: [] for row in pieces}
    with num_threads(2):
        while now := {row: ranges.pop(0) for row, ranges in pieces.items() if ranges}:
            for row, out in feed(cache, rows, now, strided=data.draw(st.booleans(), label="strided")).items():
                parts[row].append(out)
    for row, out in whole.items():
        assert torch.equal(torch.cat(parts[row]), out), f"row {row}"


SPEC = KVCacheSpec((LayerSpec(2, 1, 4, 4, 1.0),), torch.float32, torch.device("cpu"), 4, 64)


@pytest.mark.parametrize(
    ("spec", "page_size", "reason"),
    [
        (SPEC, 8, "the fused kernel has pages of 16 tokens, and backend.page_size is 8"),
        (replace(SPEC, dtype=torch.float16), 16, "takes bfloat16, float32 and float64, and the model is float16"),
        (replace(SPEC, device=torch.device("meta")), 16, "is for CPUs, and the model is on meta"),
    ],
    ids=["page size", "dtype", "device"],
)
def test_what_the_kernel_cannot_do_is_refused_in_words_or_left_to_pytorch(
    spec: KVCacheSpec, page_size: int, reason: str
) -> None:
    assert why_not_fused(SPEC, 16) is None
    assert reason in (why_not_fused(spec, page_size) or "")
    (refusal,) = ragged_backend(page_size, "fused").unsupported(spec)
    assert reason in refusal
    assert refusal.endswith("; kernels=torch serves it")
    for kernels in ("auto", "torch"):
        assert ragged_backend(page_size, kernels).unsupported(spec) == []
