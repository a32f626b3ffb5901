"""Medians, spreads and speed-ups, against sums done by hand; and which rows are repeats of each other."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from emssd_lab.report.cells import Cell, Spread, grids
from emssd_lab.report.rows import Row
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import looped

from .conftest import row

RATES = st.lists(
    st.tuples(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0.01, 100)), min_size=1, max_size=6
)  # of plain greedy decoding and of a method, and how fast the machine is in that repeat
TITLE = "demo · llma · demo, 6 prompts, 64 new tokens · float32"


def rated(rate: float, method: str, **changes: Any) -> Row:
    """A row of so many tokens/s."""
    return row(method=method, metrics_decode_tokens_per_second=rate, **changes)


def pair(greedy: float, vanilla: float, **changes: Any) -> list[Row]:
    return [rated(greedy, "greedy", **changes), rated(vanilla, "vanilla", **changes)]


def cells(rows: list[Row], method: str = "vanilla") -> list[Cell]:
    return [cell for grid in grids(rows) for cell in grid.cells if cell.line.method == method]


@given(RATES, st.randoms())
def test_a_speedup_is_the_median_ratio_within_a_repeat(rates: list[tuple[float, float, float]], random: Any) -> None:
    rows = [
        each
        for repeat, (greedy, vanilla, machine) in enumerate(rates, 1)
        for each in pair(greedy * machine, vanilla * machine, repeat=repeat)
    ]
    random.shuffle(rows)
    (cell,) = cells(rows)
    assert "baseline" not in (cell.speedup_text or "")
    expected = [vanilla / greedy for greedy, vanilla, _ in rates]  # how fast the machine was does not matter
    assert cell.speedup is not None
    assert cell.speedup.median == pytest.approx(statistics.median(expected))
    assert (cell.speedup.low, cell.speedup.high) == pytest.approx((min(expected), max(expected)))
    assert cell.speedup.count == len(rates)
    (grid,) = grids(rows)
    assert grid.ratio("vanilla", "greedy", 2) == cell.speedup_text


def test_each_method_has_the_baseline_of_its_own_kernels_and_a_baseline_none() -> None:
    rates = {"greedy": 10.0, "unpad_both": 20.0, "ragged_greedy": 40.0, "ragged": 60.0}
    (grid,) = grids([rated(rate, name) for name, rate in rates.items()])
    speedups = {cell.line.method: cell.speedup and cell.speedup.median for cell in grid.cells}
    assert speedups == {"greedy": None, "unpad_both": 2.0, "ragged_greedy": None, "ragged": 1.5}
    assert {cell.line.method for cell in grid.cells if cell.speedup_text is None} == {"greedy", "ragged_greedy"}


@looped(
    "change", [{"repeat": 2}, {"batch_size": 4}, {"model": "other"}, {"data_label": "x"}, {"dtype": "x"},
               {"options": ["model.path=b"]}],
)  # fmt: skip
def test_a_baseline_of_another_repeat_batch_size_setting_or_option_does_not_count(change: dict[str, Any]) -> None:
    (cell,) = cells([row(method="vanilla"), row(method="greedy", **change)])
    assert (cell.speedup, cell.speedup_text) == (None, "no baseline")


def test_repeats_without_a_baseline_are_counted_and_the_others_show() -> None:
    (cell,) = cells([*pair(10, 20), row(method="vanilla", repeat=2)])
    assert cell.speedup == Spread(2.0, 2.0, 2.0, 1)
    assert cell.speedup_text == "2.00, baseline in 1 of 2 repeats"


def test_a_baseline_of_another_drafters_sweep_serves_and_one_of_the_same_is_preferred() -> None:
    speculating = rated(60, "vanilla", drafter_options="llma(a=1)")
    other, own = rated(20, "greedy"), rated(30, "greedy", drafter_options="llma(a=1)")
    for rows, speedup in (([speculating, other], "3.00"), ([speculating, other, own], "2.00")):
        assert [cell.speedup_text for cell in cells(rows)] == [speedup]


def test_what_may_not_be_compared_is_in_grids_of_its_own_whose_titles_differ() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"size": "paper"}, {"max_new_tokens": 8}, {"batching": "continuous"}, {"model": "b"},
        {"dtype": "bfloat16"}, {"compiled": True},
    ]  # fmt: skip
    titles = [grid.title for grid in grids([row(**change) for change in changes])]
    assert len(set(titles)) == len(changes)
    assert titles[1].endswith("size paper · static batches")
    assert "8 new tokens" in titles[2]
    assert [grid.title for grid in grids([row()])] == [TITLE]


def test_options_that_a_row_has_no_field_for_tell_settings_apart() -> None:
    every = "data.path=x.txt"
    swept = [[every, "model.path=a/final"], [every, "model.path=b/final"], [every], [every, "kv_memory=1GiB"]]
    found = grids([row(method=method, options=options) for options in swept for method in ("greedy", "vanilla")])
    names = ["model.path=a/final", "model.path=b/final", "", "kv_memory=1GiB"]
    assert [grid.title for grid in found] == [f"{TITLE} · {name}".removesuffix(" · ") for name in names]
    assert all(len(cell.rows) == 1 for grid in found for cell in grid.cells)
