"""The padded backend's own promises: the paddings of the paper's vanilla method, counted, and holes nobody sees."""

from __future__ import annotations

import pytest
import torch
from emssd_padded import backend as backend_module
from emssd_padded.backend import PaddedBackend, SlabTable
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import Kept, KVCacheSpec, LayerSpec
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from tests.support.spies import failing
from tests.support.strategies import step_histories

LAYER = LayerSpec(num_qo_heads=1, num_kv_heads=1, key_dim=1, value_dim=1, scale=1.0)
SPEC = KVCacheSpec((LAYER,), torch.float64, torch.device("cpu"), max_batch_size=8, max_model_len=512)
CELLS = [(True, True), (True, False), (False, True), (False, False)]
each_cell = pytest.mark.parametrize(("pad_kv", "pad_inputs"), CELLS)


def allocated(pad_kv: bool, pad_inputs: bool) -> PaddedBackend:
    backend = PaddedBackend(pad_kv=pad_kv, pad_inputs=pad_inputs)
    backend.allocate(SPEC)
    return backend


def sequences(*lengths: int) -> list[Row]:
    return [Row(Request(str(i), tuple(range(length)), 100)) for i, length in enumerate(lengths)]


def step(backend: PaddedBackend, rows: list[Row], drafted: list[int], accepted: list[int]) -> tuple[int, int]:
    """Run one step without a model. Returns its padding: inputs, KV."""
    packed = pack(rows, Draft.from_chains([[0] * length for length in drafted]))
    plan = backend.plan(packed)
    for row, number in zip(rows, accepted, strict=True):
        row.advance([0] * (number + 1), None, num_drafted=number, num_accepted=number)
    backend.commit(Kept(packed.request_ids, tuple(row.num_cached for row in rows)))
    return plan.input_ids.numel() - packed.num_tokens, backend.kv_usage.padding


@each_cell
def test_paddings_are_those_of_the_case_analysis_in_table_1(pad_kv: bool, pad_inputs: bool) -> None:
    # Table 1 counts the target's own token among the accepted, as acceptance length does.
    backend, rows = allocated(pad_kv, pad_inputs), sequences(9, 9)
    assert step(backend, rows, [0, 0], [0, 0]) == (0, 0)
    assert step(backend, rows, [5, 2], [3, 0]) == (3 if pad_inputs else 0, 3 if pad_kv else 0)
    assert step(backend, rows, [2, 5], [1, 5]) == (3 if pad_inputs else 0, 4 if pad_kv else 0)


@each_cell
@given(lengths=st.lists(st.integers(1, 12), min_size=3, max_size=3), history=step_histories(3))
def test_paddings_are_distances_from_the_longest_row(
    pad_kv: bool, pad_inputs: bool, lengths: list[int], history: list[list[tuple[int, int]]]
) -> None:
    backend, rows = allocated(pad_kv, pad_inputs), sequences(*lengths)
    fed = lengths
    for rates in history:
        drafted, accepted = [list(numbers) for numbers in zip(*rates, strict=True)]
        fed = [number + more for number, more in zip(fed, drafted, strict=True)]
        kept = [number - rejected + got for number, rejected, got in zip(fed, drafted, accepted, strict=True)]
        inputs = sum(max(fed) - number for number in fed) if pad_inputs else 0
        lost = sum(max(kept) - number for number in kept) if pad_kv else 0
        assert step(backend, rows, drafted, accepted) == (inputs, lost)
        fed = [1, 1, 1]


@each_cell
def test_held_memory_is_the_rectangle_in_use(pad_kv: bool, pad_inputs: bool) -> None:
    backend, rows = allocated(pad_kv, pad_inputs), sequences(9, 4)
    step(backend, rows, [0, 0], [0, 0])
    step(backend, rows, [5, 5], [1, 5])
    # Rows of 11 and 10 tokens; with padded KV the second wrote from slot 9 on as well.
    assert backend.kv_usage.held == 2 * (15 if pad_kv else 11) * 2 * 8
    backend.release(["1"])
    assert backend.kv_usage.held == 11 * 2 * 8
    backend.release(["0"])
    assert backend.kv_usage.held == 0
    assert backend.kv_usage.peak_held == 2 * 15 * 2 * 8


@each_cell
def test_a_row_that_moves_up_takes_its_positions_along(pad_kv: bool, pad_inputs: bool) -> None:
    backend, rows = allocated(pad_kv, pad_inputs), sequences(5, 2)
    step(backend, rows, [3, 3], [3, 0])
    step(backend, rows, [0, 0], [0, 0])  # where KV is padded, after holes of the second row
    backend.release(["0"])
    (positions,) = backend.plan(pack(rows[1:], Draft.empty(1))).attention.mask.key_positions.tolist()
    assert [position for position in positions if position < SPEC.max_model_len] == [0, 1, 2, 3]


@each_cell
@pytest.mark.parametrize("at", range(3))
def test_where_memory_runs_out_half_way_the_next_step_finds_a_whole_slab(
    pad_kv: bool, pad_inputs: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are enlarged, then values, then positions."""
    backend, rows = allocated(pad_kv, pad_inputs), sequences(60, 5)
    step(backend, rows[:1], [0], [0])
    full = failing(backend_module._enlarged, torch.OutOfMemoryError(), at)
    with monkeypatch.context() as patch:
        patch.setattr(backend_module, "_enlarged", full)
        with pytest.raises(torch.OutOfMemoryError):
            backend.plan(pack(rows, Draft.from_chains([[0] * 90, []])))
    backend.release(["0"])
    plan = backend.plan(pack(rows[1:], Draft.empty(1)))
    assert plan.attention.mask.key_positions.tolist() == [[*range(5)]]
    ones = torch.ones(5, 1, 1, dtype=torch.float64)
    assert torch.equal(backend.forward(plan, 0, ones, ones, ones), ones)


@each_cell
def test_masks_are_as_wide_as_kernels_of_gpus_like_and_what_is_added_are_holes(pad_kv: bool, pad_inputs: bool) -> None:
    exact, aligned = allocated(pad_kv, pad_inputs), allocated(pad_kv, pad_inputs)
    aligned._watched = True  # as on a GPU
    generator = torch.Generator().manual_seed(0)
    for backend in (exact, aligned):
        step(backend, sequences(9, 4), [3, 5], [1, 0])
    rows = sequences(11, 5)
    rows[0].num_cached = 10
    rows[1].num_cached = 4
    packed = pack(rows, Draft.from_trees([[(7, -1), (8, -1), (9, 0)], [(7, -1)]]))
    plans = [backend.plan(packed) for backend in (exact, aligned)]
    widths = [plan.attention.mask.key_positions.shape[1] for plan in plans]
    assert widths[1] % 8 == 0
    assert 0 < widths[1] - widths[0] < 8
    query, key, value = torch.randn(3, plans[0].input_ids.numel(), 1, 1, generator=generator, dtype=torch.float64)
    outs = [backend.forward(plan, 0, query, key, value) for backend, plan in zip((exact, aligned), plans, strict=True)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    assert (plans[1].attention.mask.key_positions[:, widths[0] :] > 10**9).all()


def test_aligned_rows_write_behind_the_longest_and_others_behind_their_own() -> None:
    for pad_kv, start in [(True, 5), (False, 2)]:
        table = SlabTable(pad_kv)
        table.rows(["long", "short"])
        table.slots("long").extend(range(5))
        table.slots("short").extend(range(2))
        assert table.write_start("short") == start
        assert table.num_holes == 3
        assert table.truncate("long", 1) == [1, 2, 3, 4]
        assert table.num_slots == 2
        assert table.release(["long"]) == [1]
        assert table.rows(["short", "new"]) == [0, 1]
