"""The floor, the crossing, and acceptance by place in the draft, against their definitions."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import log2

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from emssd.report.cells import Spread, grids
from emssd.report.figures import Curve, _draw
from emssd.report.sections.acceptance import accepted_by_position, least_of_batches
from emssd.report.sections.methods import crossing_at, crossings
from emssd.report.sections.steps import Floor
from tests.support.tiers import looped

from .conftest import row


def test_the_floor_of_a_step_done_by_hand() -> None:
    floor = Floor.of(row(method="vanilla", batch_size=2))
    # 4 MB of weights and 200 tokens of KV at 2 kB, at 10 GB/s; 8 tokens a step, 100 of context each, at 100 GFLOP/s
    assert floor.byte_seconds == pytest.approx((4e6 + 200 * 2e3) / 1e10)
    assert floor.flop_seconds == pytest.approx(8 * (2 * 1e6 + 500 * 100) / 1e11)
    assert floor.bound == "bytes"


@given(st.integers(1, 64), st.integers(1, 200), st.floats(1e9, 1e12), st.floats(1e9, 1e15))
def test_arithmetic_takes_over_where_it_says(batch: int, tokens: int, bandwidth: float, rate: float) -> None:
    hardware = row().provenance["hardware"] | {"bytes_per_second": bandwidth, "flops_per_second": rate}
    provenance = {**row().provenance, "hardware": hardware}
    mine = row(batch_size=batch, metrics_decode_computed_tokens=10 * batch * tokens, provenance=provenance)
    floor = Floor.of(mine)
    assume(abs(floor.byte_seconds - floor.flop_seconds) > 1e-9 * floor.seconds)
    assert (floor.bound == "FLOPs") == (tokens >= floor.arithmetic_from)


@given(st.floats(1.05, 60), st.floats(0.05, 0.5))
def test_a_line_that_is_straight_on_a_logarithmic_scale_crosses_where_it_does(at: float, slope: float) -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    medians = {size: 1 - slope * (log2(size) - log2(at)) for size in sizes}
    assert crossing_at({size: Spread(y, y, y, 3) for size, y in medians.items()}) == pytest.approx(at)


def _crossings(by_size: dict[int, tuple[float, ...]]) -> list[str]:
    """The line of the table for speed-ups by batch size, in each repeat."""
    rows = [
        row("crossover", None, speculate=speculate, batch_size=size, repeat=repeat,
            metrics_decode_tokens_per_second=ratio if speculate else 1.0)
        for size, ratios in by_size.items()
        for repeat, ratio in enumerate(ratios)
        for speculate in (False, True)
    ]  # fmt: skip
    (grid,) = grids(rows)
    (line,) = crossings(grid).lines
    return list(line)


@looped(
    "by_size, shown",
    [
        ({1: (2, 2), 8: (0.9, 1.2), 16: (0.7, 0.9)}, ["1 and 8", "8", "9.2"]),
        ({2: (0.5, 0.6)}, ["none", "none", ""]),
        ({2: (1.5, 1.6)}, ["2", "none", ""]),
        ({2: (0.5, 0.5), 4: (2, 2)}, ["4", "none", ""]),
        ({2: (1.0,)}, ["2", "none", ""]),  # one repeat settles nothing, and is on no side
        ({1: (0.9, 0.9), 2: (1.2, 1.2), 4: (0.8, 0.8)}, ["2", "none", "2.8"]),
        ({64: (1.1, 1.1), 128: (0.9, 0.9)}, ["64", "none", "91"]),
        ({2: (2, 2), 8: (0.5, 0.5), 16: (0.9, 0.9), 32: (1.1, 1.1)}, ["2 and 32", "none", "5"]),  # it comes back
    ],
)
def test_where_speculation_pays(by_size: dict[int, tuple[float, ...]], shown: list[str]) -> None:
    assert _crossings(by_size) == ["fixed on padded", *shown]


def test_bars_are_drawn_where_they_are_and_not_from_the_line_on() -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    _draw(axes, Curve("x", {1.0: Spread(1.0, 2.0, 3.0, 2), 2.0: Spread(2.0, 1.5, 4.0, 2)}, "black"), "o")
    (bars,) = (each for each in axes.collections if isinstance(each, LineCollection))
    assert [segment.tolist() for segment in bars.get_segments()] == [[[1, 2], [1, 3]], [[2, 1.5], [2, 4]]]


ROW_STEPS = st.lists(
    st.integers(0, 7).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), min_size=1
)  # how many tokens were drafted, and how many of them accepted


@given(ROW_STEPS)
def test_acceptance_by_place_is_what_counting_row_steps_gives(row_steps: list[tuple[int, int]]) -> None:
    accepted_counts = Counter(str(accepted + 1) for _, accepted in row_steps)
    drafted = Counter(str(length) for length, _ in row_steps)
    found = accepted_by_position(accepted_counts, drafted)
    assert list(found) == list(range(1, max(length for length, _ in row_steps) + 1))
    for place, share in found.items():
        reached = [accepted for length, accepted in row_steps if length >= place]
        assert share == pytest.approx(sum(accepted >= place for accepted in reached) / len(reached))


@given(st.lists(st.floats(1, 8), min_size=1, max_size=70))
def test_the_least_of_a_batch_falls_as_batches_are_joined(taus: list[float]) -> None:
    found = least_of_batches(taus)
    assert found[1] == pytest.approx(sum(taus) / len(taus))
    assert max(found) <= len(taus)
    full = taus[: len(taus) // 32 * 32]  # the same samples in batches of 1 to 32
    nested = least_of_batches(full)
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size in nested]
    assert all(nested[a] >= nested[b] - 1e-9 for a, b in pairwise(sizes))
