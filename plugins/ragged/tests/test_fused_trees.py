"""The fused kernel on token trees: a node has the bits that it has where it is the end of a chain in the cache.

Oracles: the kernel itself on chains, which `test_fused` holds to dense attention; `DenseBackend` in float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
import torch
from emssd_ragged.fused import PAGE_SIZE, FusedKernels
from emssd_testing.oracle import DenseBackend
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import Kept, KVCacheSpec, LayerSpec
from emssd.attention.pool import KVPool
from emssd.attention.trees import ancestors
from plugins.ragged.tests.fused_cache import BLOCK, GARBAGE, QKV, Cache, dtypes, layers, num_threads, random_qkv


@pytest.fixture(autouse=True)
def _kernels(kernels: None) -> None:
    """All of these tests need them."""


@dataclass
class Row:
    """`before` tokens and a tree after them; the first `cached` of both are in the cache when the tree is verified."""

    before: int
    tree: tuple[int, ...]
    cached: int

    @property
    def kv_len(self) -> int:
        return self.before + len(self.tree)

    def way(self, token: int) -> list[int]:
        """The tokens that one token sees, itself included, in order of their positions."""
        if token < self.before:
            return list(range(token + 1))
        way = ancestors(self.tree)[token - self.before].nonzero().flatten().tolist()
        return [*range(self.before), *(self.before + node for node in way)]


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    """Bushy ones, chains, siblings alone, a few ways beside each other."""
    shape = draw(st.sampled_from(["any", "deep", "chain", "siblings"]))
    tree: list[int] = []
    for node in range(draw(st.integers(0, 24))):
        least = {"deep": max(-1, node - 3), "chain": node - 1}.get(shape, -1)
        tree.append(draw(st.integers(least, -1 if shape == "siblings" else node - 1)))
    return tuple(tree)


@st.composite
def forests(draw: st.DrawFn, longest: int = BLOCK + 2) -> list[Row]:
    """Rows that begin with so many tokens at most; the first may be such that its tree begins a block of the kernel."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 4))):
        long = st.integers(BLOCK - 18, longest) if longest >= BLOCK and not rows else st.nothing()
        before = draw(st.integers(1, 50) | long)
        tree = draw(trees())
        rows.append(Row(before, tree, draw(st.integers(0, before + len(tree) - 1))))
    return rows


def verify(cache: Cache, rows: Seq[Row], all_qkv: Seq[QKV]) -> list[torch.Tensor]:
    """The rows with their trees: first what is cached, row by row, then the rest in one step."""
    first = []
    for number, (row, qkv) in enumerate(zip(rows, all_qkv, strict=True)):
        part = [tensor[: row.cached] for tensor in qkv]
        tree = row.tree[: max(0, row.cached - row.before)]
        first += cache.step({str(number): part}, [row.cached], [tree]) if row.cached else [qkv[0][:0]]
    new = {str(number): [tensor[row.cached :] for tensor in qkv]
           for number, (row, qkv) in enumerate(zip(rows, all_qkv, strict=True))}  # fmt: skip
    rest = cache.step(new, [row.kv_len for row in rows], [row.tree for row in rows])
    # Of a step with a row without any token before it, there are no outputs of the right shape to put first.
    return [torch.cat([begun, out]) if row.cached else out for row, begun, out in zip(rows, first, rest, strict=True)]


@given(layer=layers(), dtype=dtypes, rows=forests(), seed=st.integers(0, 2**16), threads=st.integers(1, 2))
def test_a_node_has_the_bits_of_the_end_of_a_chain(
    layer: LayerSpec, dtype: torch.dtype, rows: list[Row], seed: int, threads: int
) -> None:
    all_qkv = [random_qkv(layer, dtype, row.kv_len, seed + number) for number, row in enumerate(rows)]
    cache = Cache(layer, dtype)
    with num_threads(threads):
        outputs = verify(cache, rows, all_qkv)
    for number, (row, qkv, out) in enumerate(zip(rows, all_qkv, outputs, strict=True)):
        assert torch.equal(out[: row.before], cache.chain([tensor[: row.before] for tensor in qkv]))
        for token in range(row.before, row.kv_len):
            alone = cache.chain([tensor[row.way(token)] for tensor in qkv])[-1]
            assert torch.equal(out[token], alone), f"row {number}, node {token - row.before}"


@given(layer=layers(), rows=forests(longest=50), seed=st.integers(0, 2**16))
def test_trees_in_float64_are_those_of_the_dense_reference(layer: LayerSpec, rows: list[Row], seed: int) -> None:
    all_qkv = [random_qkv(layer, torch.float64, row.kv_len, seed + number) for number, row in enumerate(rows)]
    right = verify(Cache(layer, torch.float64, DenseBackend()), rows, all_qkv)
    for out, expected in zip(verify(Cache(layer, torch.float64), rows, all_qkv), right, strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bad", GARBAGE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 5])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tree", [(), (-1, -1, 0, 1, 2, 2, 3, 4, 7, 5, -1, 8)], ids=["chain", "tree"])
def test_a_node_sees_nothing_of_its_siblings_of_later_tokens_and_of_what_is_before_its_window(
    tree: tuple[int, ...], heads: int, window: int | None, dtype: torch.dtype, bad: float
) -> None:
    """Bit by bit, whatever one token holds. The tree begins at an odd position and ends in the next page."""
    layer = LayerSpec(num_qo_heads=heads, num_kv_heads=1, key_dim=5, value_dim=19, scale=1.0, sliding_window=window)
    row = Row(BLOCK - 5 if tree else BLOCK + 12, tree, cached=BLOCK - 8)
    qkv = random_qkv(layer, dtype, row.kv_len, heads)
    cache = Cache(layer, dtype)
    (clean,) = verify(cache, [row], [qkv])
    for token in range(row.cached - 2, row.kv_len):
        spoilt = [tensor.clone() for tensor in qkv]
        for tensor in spoilt:
            tensor[token] = bad
        cache.forget("0")
        (out,) = verify(cache, [row], [spoilt])
        unseen = [node for node in range(row.kv_len) if token not in row.way(node)[-(window or row.kv_len) :]]
        assert torch.equal(out[unseen], clean[unseen]), f"token {token}"
        assert bool(out[token].isfinite().all()) == (abs(bad) == 1e30 and dtype is torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_beside_prompts_and_chains_on_two_threads_a_node_has_its_bits(dtype: torch.dtype) -> None:
    """A step with a row of more tokens than are stored and attended to in one task."""
    layer = LayerSpec(num_qo_heads=6, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.125)
    wide = tuple(node // 2 - 1 for node in range(41))
    rows = [Row(30 + 7 * number, tree, 25) for number, tree in enumerate([wide, (), (-1, 0, 0), (-1, -1), ()] * 2)]
    rows.append(Row(100, (), 10))
    all_qkv = [random_qkv(layer, dtype, row.kv_len, number) for number, row in enumerate(rows)]
    cache = Cache(layer, dtype)
    alone = [[cache.chain([tensor[row.way(token)] for tensor in qkv])[-1] for token in range(row.kv_len)]
             for row, qkv in zip(rows, all_qkv, strict=True)]  # fmt: skip
    with num_threads(2):
        outputs = verify(cache, rows, all_qkv)
    for number, (out, right) in enumerate(zip(outputs, alone, strict=True)):
        assert torch.equal(out, torch.stack(right)), f"row {number}"


@given(data=st.data(), layer=layers(), dtype=dtypes, rows=forests(), seed=st.integers(0, 2**16))
def test_an_accepted_way_goes_on_as_a_chain(
    data: st.DataObject, layer: LayerSpec, dtype: torch.dtype, rows: list[Row], seed: int
) -> None:
    """After `commit`, the next token has the bits that it has after a chain of the accepted tokens."""
    all_qkv = [random_qkv(layer, dtype, row.kv_len + 1, seed + number) for number, row in enumerate(rows)]
    cache = Cache(layer, dtype)
    verify(cache, rows, [[tensor[:-1] for tensor in qkv] for qkv in all_qkv])
    ways = [row.way(data.draw(st.integers(row.before - 1, row.kv_len - 1), label="accepted")) for row in rows]
    names = tuple(map(str, range(len(rows))))
    moved = [way[row.before :] for way, row in zip(ways, rows, strict=True)]
    sources = tuple(
        tuple(tail) if tail != list(range(row.before, row.before + len(tail))) else ()
        for tail, row in zip(moved, rows, strict=True)
    )
    cache.backend.commit(Kept(names, tuple(map(len, ways)), sources))
    new = {name: [tensor[-1:] for tensor in qkv] for name, qkv in zip(names, all_qkv, strict=True)}
    outputs = cache.step(new, [len(way) + 1 for way in ways])
    for out, way, qkv in zip(outputs, ways, all_qkv, strict=True):
        assert torch.equal(out[0], cache.chain([tensor[[*way, len(tensor) - 1]] for tensor in qkv])[-1])


@given(dtype=dtypes, heads=st.integers(1, 3), dims=st.tuples(st.integers(1, 40), st.integers(1, 40)), data=st.data())
def test_tokens_move_as_in_a_plain_copy(
    dtype: torch.dtype, heads: int, dims: tuple[int, int], data: st.DataObject
) -> None:
    """Also where a slot is both read and written. Oracle: PyTorch's indexing of the same pages, token by token."""
    layer = LayerSpec(heads, heads, *dims, scale=1.0)
    kernels = FusedKernels()
    pool = KVPool([kernels.page_shapes(layer, dtype, PAGE_SIZE)], PAGE_SIZE, dtype, torch.device("cpu"))
    kernels.allocate(KVCacheSpec((layer,), dtype, torch.device("cpu"), 1, 64), pool)
    pool.enlarge(4)
    slots = st.lists(st.integers(0, 63), min_size=8, max_size=8, unique=True)
    sources, targets = (torch.tensor(data.draw(slots, label=name)) for name in ("sources", "targets"))
    for stored, token_major in ((pool.keys, (0, 3, 1, 2, 4)), (pool.values, (0, 2, 4, 1, 3))):
        stored[0].copy_(torch.randn(stored[0].shape))
        right = stored[0].permute(token_major).clone(memory_format=torch.contiguous_format)
        tokens = right.view(64, -1)  # pages and places in a page, then what a token has
        tokens[targets] = tokens[sources]
        kernels.move(stored[0], sources, targets)
        assert torch.equal(stored[0].permute(token_major), right)
