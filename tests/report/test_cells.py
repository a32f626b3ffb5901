"""Medians, spreads and speed-ups, against sums done by hand."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emssd.report.cells import Grid, Spread, grids
from emssd.report.rows import Row
from tests.support.tiers import looped

from .conftest import row

RATES = st.lists(
    st.tuples(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0.01, 100)), min_size=1, max_size=6
)  # of plain greedy decoding and of a method, and how fast the machine is in that repeat


def _rows(rates: list[tuple[float, float, float]], **changes: Any) -> list[Row]:
    found = []
    for repeat, (greedy, vanilla, machine) in enumerate(rates, 1):
        found.append(row(method="greedy", repeat=repeat, metrics_decode_tokens_per_second=greedy * machine, **changes))
        found.append(
            row(method="vanilla", repeat=repeat, metrics_decode_tokens_per_second=vanilla * machine, **changes)
        )
    return found


def _only(rows: list[Row]) -> Grid:
    (grid,) = grids(rows)
    return grid


@given(RATES, st.randoms())
def test_a_speedup_is_the_median_ratio_within_a_repeat(rates: list[tuple[float, float, float]], random: Any) -> None:
    rows = _rows(rates)
    random.shuffle(rows)
    grid = _only(rows)
    cell = grid.get("vanilla", 2)
    assert cell is not None
    assert "baseline" not in cell.speedup_text
    expected = [vanilla / greedy for greedy, vanilla, _ in rates]  # how fast the machine was does not matter
    assert cell.speedup is not None
    assert cell.speedup.median == pytest.approx(statistics.median(expected))
    assert (cell.speedup.low, cell.speedup.high) == pytest.approx((min(expected), max(expected)))
    assert cell.speedup.count == len(rates)
    ratio = grid.ratio("vanilla", "greedy", 2)
    assert ratio is not None
    assert ratio.median == pytest.approx(cell.speedup.median)


def test_each_method_has_the_baseline_of_its_own_kernels() -> None:
    rates = {"greedy": 10.0, "unpad_both": 20.0, "ragged_greedy": 40.0, "ragged": 60.0}
    grid = _only([row(method=name, metrics_decode_tokens_per_second=rate) for name, rate in rates.items()])
    speedups = {cell.line.method: cell.speedup and cell.speedup.median for cell in grid.cells}
    assert speedups == {"greedy": None, "unpad_both": 2.0, "ragged_greedy": None, "ragged": 1.5}


def test_a_baseline_of_another_repeat_batch_size_model_or_file_does_not_count() -> None:
    others: list[dict[str, Any]] = [
        {"repeat": 2},
        {"batch_size": 4},
        {"model": "other"},
        {"data_label": "x"},
        {"dtype": "x"},
    ]
    rows = [row(method="vanilla"), *(row(method="greedy", **change) for change in others)]
    cell = next(cell for grid in grids(rows) for cell in grid.cells if cell.line.method == "vanilla")
    assert cell.speedup is None
    assert cell.speedup_text == "no baseline"


def test_repeats_without_a_baseline_are_counted_and_the_others_show() -> None:
    rows = [*_rows([(10, 20, 1)]), row(method="vanilla", repeat=2)]
    cell = _only(rows).get("vanilla", 2)
    assert cell is not None
    assert cell.speedup == Spread(2.0, 2.0, 2.0, 1)
    assert cell.speedup_text == "2.00, baseline in 1 of 2 repeats"


@looped("experiment", ["padding_ratio", "acceptance", "step_time"])
def test_experiments_that_run_no_plain_decoding_lack_no_baseline(experiment: str) -> None:
    cell = _only([row(experiment, "vanilla")]).get("vanilla", 2)
    assert cell is not None
    assert cell.speedup_text is None


def test_a_baseline_has_no_speedup_and_is_not_said_to_lack_one() -> None:
    cell = _only(_rows([(10, 20, 1)])).get("greedy", 2)
    assert cell is not None
    assert cell.speedup is None
    assert cell.speedup_text is None


def test_a_baseline_of_another_drafters_sweep_serves_and_one_of_the_same_is_preferred() -> None:
    speculating = row(method="vanilla", drafter_options="llma(a=1)", metrics_decode_tokens_per_second=60)
    other = row(method="greedy", drafter_options="llma", metrics_decode_tokens_per_second=20)
    own = row(method="greedy", drafter_options="llma(a=1)", metrics_decode_tokens_per_second=30)

    def speedup(rows: list[Row]) -> float | None:
        cells = [cell for grid in grids(rows) for cell in grid.cells if cell.line.method == "vanilla"]
        return cells[0].speedup.median if cells[0].speedup else None

    assert speedup([speculating, other]) == 3.0
    assert speedup([speculating, other, own]) == 2.0


def test_what_may_not_be_compared_is_in_grids_of_its_own() -> None:
    changes: list[dict[str, Any]] = [{}, {"model": "b"}, {"dtype": "bfloat16"}, {"compiled": True}, {"size": "paper"}]
    assert len(grids([row(**change) for change in changes])) == len(changes)


def test_settings_that_look_alike_are_told_apart() -> None:
    changes: list[dict[str, Any]] = [{}, {"size": "paper"}, {"max_new_tokens": 8}, {"batching": "continuous"}]
    titles = [grid.title for grid in grids([row(**change) for change in changes])]
    assert len(set(titles)) == len(changes)
    assert titles[1].endswith("size paper · static batches")
    assert "8 new tokens" in titles[2]
    (alone,) = grids([row()])
    assert alone.title == "demo · llma · demo, 6 prompts, 64 new tokens · float32"
