"""Medians, spreads and speed-ups, against sums done by hand; and which rows are repeats of each other."""

from __future__ import annotations

import statistics
from random import Random
from typing import Any

import pandas as pd
import pytest
from emssd_lab.report.cells import Spread, frame, grids, over, speedup_text
from emssd_lab.report.rows import Row
from hypothesis import example, given, settings
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


def speedups(rows: list[Row]) -> dict[str, str | None]:
    """The text of each method; of several settings, that of the last."""
    cells = [cell for grid in grids(frame(rows)) for _, cell in grid.cells()]
    return {cell.method.iloc[0]: speedup_text(cell) for cell in cells}


@settings(max_examples=max(1, settings.default.max_examples // 8))
@given(RATES, st.randoms())
@example([(10.0, 20.0, 1.0), (10.0, 30.0, 4.0)], Random(0))
def test_a_speedup_is_the_median_ratio_within_a_repeat(rates: list[tuple[float, float, float]], random: Any) -> None:
    rows = [
        made
        for repeat, (greedy, vanilla, machine) in enumerate(rates, 1)
        for made in pair(greedy * machine, vanilla * machine, repeat=repeat)
    ]
    random.shuffle(rows)
    (grid,) = grids(frame(rows))
    vanilla = grid.of("vanilla")
    spread = Spread.of(vanilla.speedup)
    assert spread is not None
    expected = [vanilla / greedy for greedy, vanilla, _ in rates]  # how fast the machine was does not matter
    assert spread.median == pytest.approx(statistics.median(expected))
    assert (spread.low, spread.high, spread.count) == pytest.approx((min(expected), max(expected), len(rates)))
    assert speedups(rows)["vanilla"] == spread.text()
    assert Spread.of(over(vanilla, grid.of("greedy"))) == spread


@looped(
    "rows, texts",
    [
        (  # each method has the baseline of its own kernels, and a baseline none
            [rated(rate, name) for name, rate in
             {"greedy": 10.0, "unpad_both": 20.0, "ragged_greedy": 40.0, "ragged": 60.0}.items()],
            {"greedy": None, "unpad_both": "2.00", "ragged_greedy": None, "ragged": "1.50"},
        ),
        ([*pair(10, 20), row(method="vanilla", repeat=2)], {"vanilla": "2.00, baseline in 1 of 2 repeats"}),
        (pair(0, 0), {"vanilla": "no baseline"}),  # a token for each row takes no steps of decoding
        *(  # one of another drafter's sweep serves, and that of the same is preferred
            ([rated(60, "vanilla", drafter_options="llma(a=1)"), rated(20, "greedy"), *same], {"vanilla": text})
            for same, text in (([], "3.00"), ([rated(30, "greedy", drafter_options="llma(a=1)")], "2.00"))
        ),
        *(  # another repeat, batch size, setting or option is another run
            ([row(method="vanilla"), row(method="greedy", **change)], {"vanilla": "no baseline"})
            for change in ({"repeat": 2}, {"batch_size": 4}, {"model": "other"}, {"data_label": "x"}, {"dtype": "x"},
                           {"options": ["model.path=b"]})
        ),
    ],
)  # fmt: skip
def test_the_baseline_of_a_row(rows: list[Row], texts: dict[str, str | None]) -> None:
    assert texts.items() <= speedups(rows).items()


def test_numbers_that_are_missing_are_no_repeats() -> None:
    assert Spread.of([1.0, float("nan"), 3.0]) == Spread(2.0, 1.0, 3.0, 2)
    assert Spread.of(pd.Series(dtype=float)) is None


def test_settings_that_differ_have_grids_of_their_own_and_titles_that_say_in_what() -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({}, f"{TITLE} · size small · static batches"),
        ({"size": "paper"}, f"{TITLE} · size paper · static batches"),
        ({"max_new_tokens": 8}, TITLE.replace("64 new", "8 new")),
        ({"batching": "continuous"}, f"{TITLE} · size small · continuous batches"),
        ({"model": "b"}, TITLE.replace("demo", "b", 1)),
        ({"dtype": "bfloat16"}, TITLE.replace("float32", "bfloat16")),
        ({"compiled": True}, f"{TITLE}, compiled"),
    ]
    titles = [title for _, title in changes]
    assert [grid.title for grid in grids(frame(row(**change) for change, _ in changes))] == titles
    every = "data.path=x.txt"  # options that a row has no field for
    swept = [[every, "model.path=a/final"], [every, "model.path=b/final"], [every], [every, "kv_memory=1GiB"]]
    rows = frame(row(method=method, options=options) for options in swept for method in ("greedy", "vanilla"))
    names = ["model.path=a/final", "model.path=b/final", "", "kv_memory=1GiB"]
    assert [grid.title for grid in grids(rows)] == [f"{TITLE} · {name}".removesuffix(" · ") for name in names]
    assert all(size == 1 for grid in grids(rows) for size in grid.cells().size())
