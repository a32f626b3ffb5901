"""Page metadata and tree masks against oracles that are written out token by token."""

from __future__ import annotations

from emssd_flashinfer.tables import FixedShape, largest_metadata, step_pages, tree_mask
from emssd_testing.oracle import seen
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.attention.pages import PageTable
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from tests.attention.test_trees import steps as tree_steps
from tests.support.reference_kernels import seen_of
from tests.support.trees import Tree


@st.composite
def steps(draw: st.DrawFn) -> tuple[PageTable, PackedInputs]:
    """A page table with a history, and the packed inputs of a step, reserved."""
    table = PageTable(draw(st.integers(1, 5)))
    rows = []
    for name in range(draw(st.integers(1, 4))):
        table.reserve("gone", draw(st.integers(0, 9)))  # so that pages of rows are not neighbours
        if draw(st.booleans()):
            table.release(["gone"])
        length = draw(st.integers(1, 17))
        row = Row(Request(str(name), tuple(range(length)), 100))
        row.num_cached = draw(st.integers(0, length - 1))
        table.reserve(str(name), row.num_cached)
        rows.append(row)
    packed = pack(rows, Draft.from_chains([[0] * draw(st.integers(0, 6)) for _ in rows]))
    for request_id, kv_len in zip(packed.request_ids, packed.kv_lens, strict=True):
        table.reserve(request_id, kv_len + draw(st.integers(0, 6)))  # a longer step may have been given up
    return table, packed


@given(step=steps())
def test_metadata_reads_and_writes_the_slots_of_every_token(step: tuple[PageTable, PackedInputs]) -> None:
    table, packed = step
    metadata = step_pages(table, packed).metadata()
    size, qo, kv = table.page_size, metadata.qo_indptr.tolist(), metadata.kv_indptr.tolist()
    assert metadata.kv_lens == list(packed.kv_lens)
    assert metadata.num_tokens == packed.num_tokens
    assert metadata.max_q_len == max(packed.lengths)
    for row, (request_id, kv_len) in enumerate(zip(packed.request_ids, packed.kv_lens, strict=True)):
        pages = metadata.kv_indices[kv[row] : kv[row + 1]].tolist()
        last = int(metadata.kv_last_page_len[row])
        assert 1 <= last <= size
        read = [page * size + offset for page in pages for offset in range(size)][: (len(pages) - 1) * size + last]
        assert read == table.slots(request_id, range(kv_len))
        assert metadata.slots[qo[row] : qo[row + 1]].tolist() == read[kv_len - packed.lengths[row] :]


def test_what_a_failed_step_took_is_given_back_before_the_next_takes_its_own() -> None:
    table, rows = PageTable(4, max_pages=5), [Row(Request(name, (1,) * 6, 9)) for name in "ab"]
    table.reserve_step(pack(rows, Draft.from_chains([[0] * 6, []])))
    assert [len(table.pages(name)) for name in "ab"] == [3, 2]
    table.reserve_step(pack(rows, Draft.from_chains([[], [0] * 6])))  # together they would be too many
    assert [len(table.pages(name)) for name in "ab"] == [2, 3]
    for row in rows:
        row.num_cached = 6
        row.extend([1])
    kept = table.pages("a")[:]
    table.reserve_step(pack(rows, Draft.empty(2)))
    assert table.pages("a") == kept


@given(num_rows=st.integers(1, 9), more=st.integers(0, 50), page_size=st.integers(1, 17))
def test_the_largest_plan_has_all_rows_and_queries_of_its_shape(num_rows: int, more: int, page_size: int) -> None:
    metadata = largest_metadata(FixedShape(num_rows, num_rows + more, 0), page_size)
    assert metadata.num_tokens == num_rows + more
    assert metadata.kv_lens == metadata.qo_indptr.diff().tolist()
    assert min(metadata.kv_lens) >= 1
    assert metadata.max_q_len == more + 1
    assert len(metadata.kv_indices) == int(metadata.kv_indptr[-1])


@given(tree_steps(), st.none() | st.integers(1, 6))
def test_a_node_sees_its_ancestors_and_itself_and_nobody_else(
    step: tuple[list[Row], list[Tree], list[tuple[Row, int]]], window: int | None
) -> None:
    rows, forest, pieces = step
    packed = pack(rows, Draft.from_trees(forest), pieces)
    mask = tree_mask(packed, window)
    for row, (q_len, kv_len) in enumerate(zip(packed.lengths, packed.kv_lens, strict=True)):
        for token, bits in enumerate(seen_of(mask, row, q_len, kv_len).tolist(), start=kv_len - q_len):
            visible = seen(packed, row, token)
            assert [key for key, bit in enumerate(bits) if bit] == (visible if window is None else visible[-window:])
    assert mask.indptr[-1] == len(mask.bits)
