"""The fused kernel: within rounding of dense float64 attention, and each query's bits depend on its own row alone.

Oracle: `dense`, softmax attention over one row in float64, from the definition. `expected` says how far rounding may
take the kernel from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from emssd_ragged.backend import ragged_backend
from emssd_ragged.fused import PAGE_SIZE, FusedKernels, why_not_fused
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec, PackedInputs
from emssd.attention.pages import PageTable
from emssd.attention.pool import KVPool
from tests.support.tiers import looped

BLOCK = 512  # tokens between two corrections of the kernel's running maximum
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # of one result, relative
GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e30]
Ranges = list[tuple[int, int]]

dtypes = st.sampled_from(list(ROUNDING))


@st.composite
def layers(draw: st.DrawFn) -> LayerSpec:
    """Up to nine query heads share one KV head, a few more than the kernel computes at once; so do value dimensions."""
    num_kv_heads = draw(st.integers(1, 2))
    return LayerSpec(
        num_qo_heads=num_kv_heads * draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        key_dim=draw(st.integers(1, 40)),
        value_dim=draw(st.integers(1, 9) | st.integers(10, 100)),
        scale=draw(st.sampled_from([1.0, 0.125, 0.37])),
        sliding_window=draw(st.none() | st.integers(1, 40) | st.integers(BLOCK - 20, BLOCK + 40)),
        softcap=draw(st.sampled_from([None, None, 1.5, 30.0])),
    )


# The steps of each row, of drafts or of prompts; the first row may begin with what fills a block of the kernel or two.
steps_of_rows = st.lists(
    st.lists(st.integers(1, 9) | st.integers(10, 70), min_size=1, max_size=3), min_size=1, max_size=4
)
beginnings = st.just([]) | st.lists(st.integers(BLOCK - 20, BLOCK + 20), min_size=1, max_size=1) | st.just([2 * BLOCK])
histories = st.builds(lambda beginning, rows: [beginning + rows[0], *rows[1:]], beginnings, steps_of_rows)


@dataclass
class Rows:
    """Random queries, keys and values of some rows, and a kernel whose pages are shuffled and full of `garbage`."""

    layer: LayerSpec
    dtype: torch.dtype
    kv_lens: list[int]
    seed: int
    garbage: float = float("nan")

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.layer.num_qo_heads, self.layer.key_dim), (self.layer.num_kv_heads, self.layer.key_dim)
        self.qkv = [
            [torch.randn(kv_len, *shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in
             (*heads, (self.layer.num_kv_heads, self.layer.value_dim))]
            for kv_len in self.kv_lens
        ]  # fmt: skip
        self._order = torch.Generator().manual_seed(self.seed)
        self.forget()

    def forget(self) -> None:
        """Begin again with an empty cache and other pages."""
        spec = KVCacheSpec((self.layer,), self.dtype, torch.device("cpu"), len(self.kv_lens), max(self.kv_lens))
        num_pages = [-(-kv_len // PAGE_SIZE) for kv_len in self.kv_lens]
        self._kernel = FusedKernels()
        pool = KVPool([self._kernel.page_shapes(self.layer, self.dtype, PAGE_SIZE)], PAGE_SIZE, self.dtype, spec.device)
        self._kernel.allocate(spec, pool)
        pool.enlarge(sum(num_pages) + 3)
        for pages in (*pool.keys, *pool.values):
            pages.fill_(self.garbage)
        shuffled = torch.randperm(sum(num_pages) + 3, generator=self._order).tolist()
        self._table = PageTable(PAGE_SIZE)
        self._table._pages = {
            str(row): array("i", [shuffled.pop() for _ in range(count)]) for row, count in enumerate(num_pages)
        }

    def step(self, ranges: dict[int, tuple[int, int]], *, strided: bool = False) -> dict[int, torch.Tensor]:
        """Feed tokens ``start:stop`` of some rows in one call. Returns each row's ``[stop - start, heads, dim]``."""
        lengths = [stop - start for start, stop in ranges.values()]
        packed = PackedInputs(
            request_ids=tuple(map(str, ranges)),
            input_ids=torch.empty(0),
            position_ids=torch.empty(0),
            qo_indptr=(0, *accumulate(lengths)),
            kv_lens=tuple(stop for _, stop in ranges.values()),
            logit_rows=torch.empty(0),
        )
        rows = [[tensor[start:stop] for tensor in self.qkv[row]] for row, (start, stop) in ranges.items()]
        together = [torch.cat(tensors) for tensors in zip(*rows, strict=True)]
        if strided:
            together = [_spread(tensor) for tensor in together]
        out = self._kernel.forward(self._kernel.plan(packed, self._table), 0, *together)
        return dict(zip(ranges, out.split(lengths), strict=True))


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a part of a larger tensor, heads first, with rubbish between."""
    tokens, heads, dim = tensor.shape
    larger = torch.full((heads + 1, tokens + 2, dim + 3), 1e30, dtype=tensor.dtype)
    view = larger[1:, 1:-1, 2 : 2 + dim].transpose(0, 1)
    view.copy_(tensor)
    return view


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


def expected(rows: Rows, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The right output, ``[tokens, heads, value_dim]``, and how far rounding can take the kernel's from it.

    Errors of scores (of a weight and of the sum that it is divided by) and of the exponential turn into relative errors
    of weights, and a sum of n terms is off by n roundings of the sum of magnitudes. In bfloat16 all this is computed in
    float32; then weights are rounded once, and so are outputs.
    """
    out, magnitude, off = dense(rows.layer, *rows.qkv[row])
    unit = ROUNDING[torch.float32 if rows.dtype is torch.bfloat16 else rows.dtype]
    terms = 2 * rows.kv_lens[row] + 8 * (1 + rows.kv_lens[row] // BLOCK)
    relative = torch.expm1(2 * unit * off).unsqueeze(-1) + unit * terms
    if rows.dtype is torch.bfloat16:
        return out, magnitude * (relative + 1.01 * ROUNDING[rows.dtype]) + 1.01 * ROUNDING[rows.dtype] * out.abs()
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
    rows = Rows(layer, dtype, [sum(row) for row in steps], seed, garbage)
    cuts = [list(pairwise([0, *accumulate(row)])) for row in steps]
    oracle = [expected(rows, row) for row in range(len(steps))]
    for number in range(max(map(len, cuts))):
        now = {row: ranges[number] for row, ranges in enumerate(cuts) if number < len(ranges)}
        for row, out in rows.step(now, strided=strided).items():
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
    rows = Rows(layer, torch.float32, [1100], seed=0)
    rows.qkv[0][1].zero_()
    rows.qkv[0][2].zero_()
    marked = 300
    rows.qkv[0][2][marked] = 1
    out = torch.cat([rows.step({0: (0, 900)})[0], rows.step({0: (900, 1100)})[0]]).flatten()
    positions = torch.arange(1100)
    sees = (positions >= marked) & (positions < marked + window)
    torch.testing.assert_close(out, sees / (positions + 1).clamp(max=window))


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_pieces(data: st.DataObject, kv_len: int) -> Ranges:
    cuts = data.draw(st.lists(st.integers(1, kv_len), max_size=4, unique=True), label="cuts")
    return list(pairwise(sorted({0, *cuts, kv_len})))


@given(data=st.data(), layer=layers(), dtype=st.sampled_from([torch.bfloat16, torch.float32]), seed=st.integers(0, 999),
       kv_lens=st.lists(st.integers(1, 80) | st.integers(BLOCK - 5, BLOCK + 60), min_size=2, max_size=4))  # fmt: skip
def test_a_query_has_the_same_bits_alone_token_by_token_chunked_and_in_a_batch_with_one_or_two_threads(
    data: st.DataObject, layer: LayerSpec, dtype: torch.dtype, seed: int, kv_lens: list[int]
) -> None:
    rows = Rows(layer, dtype, kv_lens, seed)
    with num_threads(1):
        whole = rows.step({row: (0, kv_len) for row, kv_len in enumerate(kv_lens)})
    alone = data.draw(st.integers(0, len(kv_lens) - 1), label="alone")
    rows.forget()
    single = [rows.step({alone: (token, token + 1)})[alone] for token in range(kv_lens[alone])]
    assert torch.equal(torch.cat(single), whole[alone])
    rows.forget()
    pieces = {row: in_pieces(data, kv_len) for row, kv_len in enumerate(kv_lens)}
    parts: dict[int, list[torch.Tensor]] = {row: [] for row in pieces}
    with num_threads(2):
        while now := {row: ranges.pop(0) for row, ranges in pieces.items() if ranges}:
            for row, out in rows.step(now, strided=data.draw(st.booleans(), label="strided")).items():
                parts[row].append(out)
    for row, out in whole.items():
        assert torch.equal(torch.cat(parts[row]), out), f"row {row}"


@looped("dtype", [torch.bfloat16, torch.float32])
@looped("num_rows", [40, 2])
def test_a_query_has_the_same_bits_in_a_batch_of_many_rows_on_two_threads(num_rows: int, dtype: torch.dtype) -> None:
    """Seven drafted tokens a row, and beside them rows that are still at their prompts."""
    layer = LayerSpec(num_qo_heads=6, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.125)
    rows = Rows(layer, dtype, [100 + 7 * row for row in range(num_rows)], seed=1)
    now = {row: (kv_len - (90 if row % 9 == 8 else 8), kv_len) for row, kv_len in enumerate(rows.kv_lens)}
    alone = {}
    with num_threads(1):
        for row, (start, stop) in now.items():
            rows.step({row: (0, start)})
            alone[row] = torch.cat([rows.step({row: (token, token + 1)})[row] for token in range(start, stop)])
    with num_threads(2):
        together = rows.step(now)
    for row, out in together.items():
        assert torch.equal(out, alone[row]), f"row {row}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_query_sees_nothing_of_tokens_behind_its_own_nor_before_its_window(
    heads: int, window: int | None, dtype: torch.dtype, bad: float
) -> None:
    """Bit by bit, whatever one token of the step holds: queries share passes, and tokens share cells."""
    layer = LayerSpec(num_qo_heads=heads, num_kv_heads=1, key_dim=5, value_dim=19, scale=1.0, sliding_window=window)
    rows = Rows(layer, dtype, [BLOCK + 12], seed=heads)
    start = BLOCK - 9
    clean = torch.cat([rows.step({0: (0, start)})[0], rows.step({0: (start, BLOCK + 12)})[0]])
    for token in range(start - 3, BLOCK + 12):
        rows.forget()
        whole = [tensor.clone() for tensor in rows.qkv[0]]
        for tensor in rows.qkv[0]:
            tensor[token] = bad
        out = torch.cat([rows.step({0: (0, start)})[0], rows.step({0: (start, BLOCK + 12)})[0]])
        rows.qkv[0] = whole
        unseen = [i for i in range(len(out)) if i < token or (window is not None and i >= token + window)]
        assert torch.equal(out[unseen], clean[unseen]), f"token {token}"
        assert bool(out[token].isfinite().all()) == (abs(bad) == 1e30 and dtype is torch.float64)


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
