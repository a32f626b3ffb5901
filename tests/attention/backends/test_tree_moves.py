"""After a step with trees each row's KV is that of a chain; sliding windows count positions in a tree, not slots."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from emssd_padded.backend import PaddedBackend
from emssd_ragged.grouped import GroupedKernels
from emssd_testing.conformance.watch import check_plan, places_of
from emssd_testing.machines import moved
from emssd_testing.oracle import DenseBackend
from emssd_testing.strategies import Waves, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, LayerSpec, PagedBackend, StepPlan
from emssd.attention.trees import path
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from tests.support.backends import MakeBackend
from tests.support.reference_kernels import ReferenceKernels
from tests.support.trees import TREE_BACKENDS

LAYER = LayerSpec(num_qo_heads=1, num_kv_heads=1, key_dim=1, value_dim=1, scale=1.0)
SPEC = KVCacheSpec((LAYER, LAYER), torch.float64, torch.device("cpu"), 8, 512, trees=True)
CELLS = [(True, True), (True, False), (False, True), (False, False)]
each_cell = pytest.mark.parametrize(("pad_kv", "pad_inputs"), CELLS)

Shape = tuple[tuple[int, ...], list[int]]  # of a row's step: a tree, and the accepted way through it


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    parents = draw(trees(draw(st.integers(0, 7))))
    return parents, path(parents, draw(st.integers(-1, len(parents) - 1)))


HISTORIES = st.lists(st.tuples(shapes(), shapes(), shapes()), min_size=1, max_size=4)


def sequences() -> list[Row]:
    return [Row(Request(str(row), tuple(range(length)), 100)) for row, length in enumerate((3, 1, 6))]


def step(backend: AttentionBackend, rows: list[Row], drafted: tuple[Shape, ...], number: int) -> int:
    """Run a step whose ids are new, as key and value of their token. Returns its padding of inputs."""
    draft = Draft.from_trees(
        [(1000 * number + 100 * row + node, parent) for node, parent in enumerate(parents)]
        for row, (parents, _) in enumerate(drafted)
    )
    packed = pack(rows, draft)
    plan = backend.plan(packed)
    ids = plan.input_ids.view(-1, 1, 1).double()
    for layer in range(2):
        backend.forward(plan, layer, torch.zeros_like(ids), ids, -ids)
    sources = tuple(moved(len(row.tokens), nodes) for row, (_, nodes) in zip(rows, drafted, strict=True))
    for index, (row, (parents, nodes)) in enumerate(zip(rows, drafted, strict=True)):
        tokens = [1000 * number + 100 * index + node for node in nodes]
        row.advance([*tokens, 1000 * number + 99], None, num_drafted=len(parents), num_accepted=len(nodes))
    kept = tuple(row.num_cached for row in rows)
    backend.commit(Kept(packed.request_ids, kept, sources if any(sources) else ()))
    return plan.input_ids.numel() - packed.num_tokens


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kernels", [GroupedKernels, ReferenceKernels])
@given(history=HISTORIES)
def test_pages_hold_the_accepted_tokens_in_order_and_no_more_pages_than_these_need(
    page_size: int, kernels: type, history: list[tuple[Shape, ...]]
) -> None:
    backend, rows = PagedBackend(kernels(), page_size=page_size), sequences()
    backend.allocate(SPEC)
    for number, drafted in enumerate(history, start=1):
        step(backend, rows, drafted, number)
        for row in rows:
            slots = backend._table.slots(row.request_id, range(row.num_cached))
            for sign, pool in ((1, backend._pool.keys), (-1, backend._pool.values)):
                for pages in pool:
                    held = pages.view(-1, pages.shape[-1])[slots, 0]
                    assert (sign * held).tolist() == row.tokens[: row.num_cached]
            assert len(backend._table.pages(row.request_id)) == -(-row.num_cached // page_size)


@each_cell
@given(history=HISTORIES)
def test_a_slab_holds_the_accepted_tokens_at_their_positions_and_pads_as_for_chains(
    pad_kv: bool, pad_inputs: bool, history: list[tuple[Shape, ...]]
) -> None:
    backend, rows = PaddedBackend(pad_kv=pad_kv, pad_inputs=pad_inputs), sequences()
    backend.allocate(SPEC)
    fed = [len(row.tokens) for row in rows]
    for number, drafted in enumerate(history, start=1):
        fed = [count + len(parents) for count, (parents, _) in zip(fed, drafted, strict=True)]
        kept = [count - len(parents) + len(nodes) for count, (parents, nodes) in zip(fed, drafted, strict=True)]
        padding = step(backend, rows, drafted, number)
        assert padding == (sum(max(fed) - count for count in fed) if pad_inputs else 0)
        assert backend.kv_usage.padding == (sum(max(kept) - count for count in kept) if pad_kv else 0)
        for index, row in enumerate(rows):
            held = [slot for slot, at in enumerate(backend._positions[index].tolist()) if at < 1000]
            slots = backend._table.slots(row.request_id)
            assert held == slots, "every other slot is a hole"
            assert backend._positions[index, slots].tolist() == list(range(row.num_cached))
            for sign, slabs in ((1, backend._keys), (-1, backend._values)):
                for slab in slabs:
                    assert (sign * slab[index, slots, 0, 0]).tolist() == row.tokens[: row.num_cached]
            if not pad_kv:
                assert all(right == left + 1 for left, right in pairwise(slots)), "unpadded KV has no holes"
        fed = [1] * len(rows)


LAYERS = tuple(LayerSpec(2, 1, 3, 3, 1.0, window, softcap) for window, softcap in ((1, None), (2, 5.0), (3, None)))
WINDOWED = KVCacheSpec(LAYERS, torch.float64, torch.device("cpu"), 4, 64, trees=True)


@pytest.mark.parametrize("make", TREE_BACKENDS.values(), ids=TREE_BACKENDS)
@settings(max_examples=settings.default.max_examples // 3)
@given(shapes=st.lists(st.integers(3, 7).flatmap(trees), min_size=1, max_size=3), cached=st.integers(0, 2))
def test_windows_shorter_than_a_tree_is_deep(make: MakeBackend, shapes: list[tuple[int, ...]], cached: int) -> None:
    """The first nodes of each tree are computed in a step before the others."""
    backend, dense, waves = make(), DenseBackend(), Waves(WINDOWED, 0)
    for one in (backend, dense):
        one.allocate(WINDOWED)
    rows = [Row(Request(str(row), tuple(range(10 * row, 10 * row + 2 + row)), 20)) for row in range(len(shapes))]
    nodes = [[(100 + 10 * row + node, parent) for node, parent in enumerate(tree)] for row, tree in enumerate(shapes)]
    steps = [pack(rows, Draft.from_trees([tree[:cached] for tree in nodes]))]
    steps.append(
        pack_nodes(
            [row.request_id for row in rows],
            torch.tensor([token for tree in nodes for token, _ in tree[cached:]]),
            [len(tree) - cached for tree in shapes],
            [len(row.tokens) + len(tree) for row, tree in zip(rows, shapes, strict=True)],
            shapes,
        )
    )
    for packed in steps:
        plan, right = backend.plan(packed), dense.plan(packed)
        check_plan(plan, packed)
        places = places_of(plan, packed)
        for layer in range(len(LAYERS)):
            got, expected = (_forward(one, waves, made, layer) for one, made in ((backend, plan), (dense, right)))
            wanted = packed.logit_rows  # a prompt's tokens may be repeated as padding
            torch.testing.assert_close(got[places][wanted], expected[wanted], rtol=0, atol=1e-10)


def _forward(backend: AttentionBackend, waves: Waves, plan: StepPlan, layer: int) -> torch.Tensor:
    return backend.forward(plan, layer, *waves.qkv(plan.input_ids.flatten(), layer))
