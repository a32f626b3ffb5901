"""Recorded steps of planned kernels: the ladder, the static tensors, the recording itself, and right replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from emssd_flashinfer.recorded import Staging, StaticInputs, ladder, rung
from emssd_flashinfer.tables import FixedShape, step_pages
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import PackedInputs, PagedBackend
from emssd.attention.packed import Drafted
from emssd.attention.pages import PageTable
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft
from emssd.sequences import Row
from plugins.flashinfer.tests.test_planned import CPU, SPEC, allocated, sequence
from tests.support.reference_kernels import ReferenceAttention, ReferenceKernels, rerun


class TestLadder:
    @given(max_tokens=st.integers(1, 3000), num_tokens=st.integers(1, 3000))
    def test_padding_stays_below_a_quarter_and_larger_steps_have_no_rung(
        self, max_tokens: int, num_tokens: int
    ) -> None:
        sizes = ladder(max_tokens)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] <= max_tokens
        size = rung(sizes, num_tokens)
        if size is None:
            assert num_tokens > sizes[-1]
        else:
            assert num_tokens <= size < 1.25 * num_tokens
            assert all(other < num_tokens for other in sizes if other < size)

    def test_it_reaches_its_end_and_stays_short(self) -> None:
        assert ladder(512)[-1] == 512
        assert len(ladder(512)) == 8 + 4 * 6


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[Row], Draft]]:
    """Steps of one to four rows, each of at most 16 tokens."""
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        rows = [sequence(name, draw(st.integers(1, 2))) for name in "abcd"[: draw(st.integers(1, 4))]]
        steps.append((rows, Draft.from_chains([[7] * draw(st.integers(0, 2)) for _ in rows])))
    return steps


class TestStaticInputs:
    SHAPE = FixedShape(num_rows=4, num_tokens=16, num_pages=30)

    def make(self) -> StaticInputs:
        return StaticInputs(self.SHAPE, Staging(StaticInputs.num_bytes(self.SHAPE), CPU))

    @given(history=histories(), on_host=st.booleans())
    def test_each_step_leaves_nothing_of_the_one_before(
        self, history: list[tuple[list[Row], Draft]], on_host: bool
    ) -> None:
        static = self.make()
        tables, addresses = static.tables, [table.data_ptr() for table in static.tables]
        for rows, draft in history:
            packed, table = pack(rows, draft), PageTable(3)
            wanted_ids = packed.input_ids.tolist()
            if not on_host:
                places = (packed.input_ids == 7).nonzero().flatten()
                blank = packed.input_ids.masked_fill(packed.input_ids == 7, 0)
                packed = packed._replace(input_ids=blank, drafted=Drafted(places, torch.full_like(places, 7)))
            table.reserve_step(packed)
            metadata, padding = step_pages(table, packed).metadata(), 16 - packed.num_tokens
            filled = static.fill(packed, step_pages(table, packed), np.full(16, 99))
            assert tables.input_ids.tolist() == wanted_ids + [0] * padding
            assert tables.position_ids.tolist() == packed.position_ids.tolist() + [0] * padding
            assert tables.slots.tolist() == metadata.slots.tolist() + [99] * padding
            assert tables.logit_rows.tolist() == packed.logit_rows.tolist() + [0] * (16 - len(packed.logit_rows))
            absent = [0] * (4 - len(rows))
            assert filled.kv_lens == metadata.kv_lens + absent
            assert filled.qo_indptr.diff().tolist() == packed.lengths + absent
            assert filled.kv_indices.tolist() == metadata.kv_indices.tolist()
            for host, device in (
                (filled.qo_indptr, tables.qo_indptr),
                (filled.kv_indptr, tables.kv_indptr),
                (filled.kv_last_page_len, tables.kv_last_page_len),
            ):
                assert host.tolist() == device.tolist()
                assert host.data_ptr() != device.data_ptr()
        assert addresses == [table.data_ptr() for table in static.tables]


class FakeEvent:
    """Of a device that has come as far as it is told to."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.reached, self.name = log, True, f"event {len(log)}"
        log.append(f"made {self.name}")

    def record(self) -> None:
        self.reached = False
        self.log.append(f"recorded {self.name}")

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True
        self.log.append(f"waited for {self.name}")


class TestStaging:
    @pytest.mark.parametrize("is_read", [False, True])
    def test_a_buffer_is_written_again_only_once_it_was_read(self, is_read: bool) -> None:
        log: list[str] = []
        staging, turns = Staging(8, CPU, lambda: FakeEvent(log)), list[int]()
        log.clear()
        for _ in range(4):
            turns.append(staging.next())
            staging.done()
            for event in staging._read:
                event.reached |= is_read
        assert turns == [1, 0, 1, 0]
        waits = [] if is_read else ["waited for event 1", "waited for event 0"]
        assert [line for line in log if "waited" in line] == waits
        assert [line for line in log if "recorded" in line] == ["recorded event 1", "recorded event 0"] * 2

    def test_the_beginning_is_moved_in_units_of_256_bytes_and_the_rest_stays(self) -> None:
        staging = Staging(600, CPU)
        for number, num_bytes, moved in ((1, 600, 600), (2, 257, 512), (3, 256, 256), (4, 513, 600), (5, 200, 256)):
            before = staging.memory.tolist()
            staging.buffers[staging.next()].fill_(number)
            staging.move(num_bytes)
            staging.done()
            assert staging.memory.tolist() == [number] * moved + before[moved:]

    def test_the_buffer_of_a_plan_is_given_back_when_all_layers_are_planned(self) -> None:
        log: list[str] = []

        class Logging(ReferenceKernels):
            def attention(self, *arguments: Any, **options: Any) -> ReferenceAttention:
                made = super().attention(*arguments, **options)
                plan = made.plan
                made.plan = lambda *args: (log.append("planned"), plan(*args))  # type: ignore[assignment]
                return made

        kernels = Logging(capture=rerun, max_graph_tokens=12)
        backend = PagedBackend(kernels, memory_fraction=1.0)
        backend.allocate(SPEC)
        kernels._staging = Staging(len(kernels._staging.memory), CPU, lambda: FakeEvent(log))
        log.clear()
        for name in "ab":
            backend.plan(pack([sequence(name, 5)], Draft.empty(1)))
        assert log == ["planned", "planned", "recorded event 1", "planned", "planned", "recorded event 0"]


@pytest.mark.parametrize("length", [9, 10, 13], ids=["padded", "full", "not recorded"])
def test_no_output_shows_memory_that_nobody_wrote(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = allocated(capture=rerun, max_graph_tokens=12)
    plan = backend.plan(pack([sequence("a", length)], Draft.empty(1)))
    count = plan.input_ids.numel()
    query, key, value = (
        torch.ones(count, heads, dim, dtype=torch.float64) for heads, dim in ((4, 10), (2, 10), (2, 7))
    )
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape: torch.full(shape, torch.nan, dtype=self.dtype))
    assert backend.forward(plan, 0, query, key, value).isfinite().all()


def test_padding_gets_nothing_of_a_larger_step_before_that_was_not_finite() -> None:
    backend = allocated(capture=rerun, max_graph_tokens=12)
    for name, length, filling in (("bad", 10, torch.nan), ("good", 9, 1.0)):
        plan = backend.plan(pack([sequence(name, length)], Draft.empty(1)))
        query, key, value = (
            torch.full((10, heads, dim), filling, dtype=torch.float64) for heads, dim in ((4, 10), (2, 10), (2, 7))
        )
        out = backend.forward(plan, 0, query, key, value)
        backend.release([name])
    assert out.isfinite().all()


def test_a_recorded_step_reads_no_tensor_of_its_packed_inputs() -> None:
    """A replay must read the static tensors: here the packed ones are spoilt after planning."""
    backend = allocated(capture=rerun, max_graph_tokens=12)
    packed: PackedInputs = pack([sequence("a", 3)], Draft.empty(1))
    plan = backend.plan(packed)
    wanted = [tensor.clone() for tensor in (plan.input_ids, plan.position_ids, plan.logits_to_keep)]
    for tensor in (packed.input_ids, packed.position_ids, packed.logit_rows):
        tensor.fill_(11)
    assert all(map(torch.equal, wanted, (plan.input_ids, plan.position_ids, plan.logits_to_keep)))


def test_passes_of_chains_are_planned_beforehand_and_ended_rows_write_to_the_page_of_padding() -> None:
    kernels = ReferenceKernels(capture=rerun, max_graph_tokens=8)
    backend = PagedBackend(kernels, page_size=2, memory_fraction=1.0)
    backend.allocate(SPEC)
    names, before = ("a", "b", "c"), (3, 4, 5)
    backend.plan(pack_nodes(names, torch.zeros(12, dtype=torch.int64), before, before))
    packed = pack_nodes(names, torch.tensor([7, 8, 9]), [1] * 3, [length + 1 for length in before])
    plans = backend.plan_chain(packed, [3, 1, 2])
    slots = [plan.attention.slots.tolist() for plan in plans]
    table, scrap = backend._table, 2 * (backend._pool.num_pages - 1)
    assert plans[0].input_ids.tolist() == [[7, 8, 9]]
    assert [plan.position_ids.tolist() for plan in plans] == [[[3, 4, 5]], [[4, 4, 6]], [[5, 4, 6]]]
    assert slots == [
        [*table.slots("a", [3]), *table.slots("b", [4]), *table.slots("c", [5])],
        [*table.slots("a", [4]), scrap, *table.slots("c", [6])],
        [*table.slots("a", [5]), scrap, scrap + 1],
    ]


def test_a_batch_beyond_the_ladder_has_no_passes_of_chains() -> None:
    backend = PagedBackend(ReferenceKernels(capture=rerun, max_graph_tokens=2), memory_fraction=1.0)
    backend.allocate(SPEC)
    packed = pack_nodes("abc", torch.zeros(3, dtype=torch.int64), [1] * 3, [1] * 3)
    assert not backend.plan_chain(packed, [2] * 3)
