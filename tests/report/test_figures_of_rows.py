"""The floor, the crossing, and acceptance by place in the draft, against their definitions."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import log2

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from emssd.report.cells import Spread
from emssd.report.crossing import crossing_of, verdict
from emssd.report.figures import Curve, _draw
from emssd.report.floor import Floor, arithmetic_from
from emssd.report.sections.acceptance import accepted_by_position, least_of_batches

from .conftest import row


def test_the_floor_of_a_step_done_by_hand() -> None:
    floor = Floor.of(row(method="vanilla", batch_size=2))
    assert floor is not None
    # 4 MB of weights and 200 tokens of KV at 2 kB, at 10 GB/s; 8 tokens a step, 100 of context each, at 100 GFLOP/s
    assert floor.byte_seconds == pytest.approx((4e6 + 200 * 2e3) / 1e10)
    assert floor.flop_seconds == pytest.approx(8 * (2 * 1e6 + 500 * 100) / 1e11)
    assert floor.bound == "bytes"
    assert floor.tokens_per_second == pytest.approx(4 / floor.seconds)


@given(st.integers(1, 64), st.integers(1, 200), st.floats(1e9, 1e12), st.floats(1e9, 1e15))
def test_arithmetic_takes_over_where_it_says(batch: int, tokens: int, bandwidth: float, rate: float) -> None:
    hardware = row().provenance["hardware"] | {"bytes_per_second": bandwidth, "flops_per_second": rate}
    provenance = {**row().provenance, "hardware": hardware}
    mine = row(batch_size=batch, metrics_decode_computed_tokens=10 * batch * tokens, provenance=provenance)
    floor, start = Floor.of(mine), arithmetic_from(mine)
    assert floor is not None
    assert start is not None
    assume(abs(floor.byte_seconds - floor.flop_seconds) > 1e-9 * floor.seconds)
    assert (floor.bound == "FLOPs") == (tokens >= start)


def test_a_run_without_decode_steps_has_no_floor() -> None:
    none = row(metrics_decode_steps=0, metrics_decode_row_steps=0)
    assert Floor.of(none) is None
    assert arithmetic_from(none) is None


@given(st.floats(1.05, 60), st.floats(0.05, 0.5))
def test_a_line_that_is_straight_on_a_logarithmic_scale_crosses_where_it_does(at: float, slope: float) -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    medians = {size: 1 - slope * (log2(size) - log2(at)) for size in sizes}
    found = crossing_of({size: Spread(y, y, y, 3) for size, y in medians.items()})
    assert found.at == pytest.approx(at)
    assert found.again == ()


def test_a_verdict_says_what_is_not_settled() -> None:
    spread = {1: Spread(2, 1.9, 2.1, 3), 8: Spread(1.05, 0.9, 1.2, 3), 16: Spread(0.8, 0.7, 0.9, 3)}
    said = verdict("llma", spread)
    assert "stops paying near batch size 9" in said
    assert "too close to call at 8" in said
    assert "none of the batch sizes" in verdict("llma", {2: Spread(0.5, 0.4, 0.6, 3)})
    assert "up to the largest batch size measured" in verdict("llma", {2: Spread(1.5, 1.4, 1.6, 3)})
    assert "only from batch size 4 on" in verdict("llma", {2: Spread(0.5, 0.4, 0.6, 3), 4: Spread(2, 2, 2, 3)})
    assert "one repeat" in verdict("llma", {2: Spread(1.5, 1.5, 1.5, 1)})


def test_a_line_that_comes_back_stops_paying_where_it_first_does() -> None:
    medians = {2: 2.0, 8: 0.5, 16: 0.9, 32: 1.1}
    found = crossing_of({size: Spread(y, y, y, 3) for size, y in medians.items()})
    assert found.at == pytest.approx(2 * 4 ** (1 / 1.5))
    assert found.again == (32,)
    assert "again at 32" in verdict("llma", {size: Spread(y, y, y, 3) for size, y in medians.items()})


def test_a_verdict_names_the_batch_sizes_before_it_pays() -> None:
    medians = {1: 0.9, 2: 1.2, 4: 0.8}
    spreads = {size: Spread(y, y, y, 3) for size, y in medians.items()}
    assert crossing_of(spreads).before == (1,)
    assert verdict("llma", spreads) == "llma does not pay yet at 1, and stops paying near batch size 2.8."
    assert verdict("llma", {64: Spread(1.1, 1.1, 1.1, 2), 128: Spread(0.9, 0.9, 0.9, 2)}).endswith("batch size 91.")
    assert verdict("llma", {128: Spread(1.1, 1.1, 1.1, 2), 256: Spread(0.9, 0.9, 0.9, 2)}).endswith("batch size 181.")


def test_bars_are_drawn_where_they_are_and_not_from_the_line_on() -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    _draw(axes, Curve("x", {1.0: 1.0, 2.0: 2.0}, "black", ranges={1.0: (2.0, 3.0), 2.0: (1.5, 4.0)}), "o")
    (bars,) = (each for each in axes.collections if isinstance(each, LineCollection))
    assert [segment.tolist() for segment in bars.get_segments()] == [[[1, 2], [1, 3]], [[2, 1.5], [2, 4]]]


ROW_STEPS = st.lists(
    st.integers(0, 7).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), min_size=1
)  # how many tokens were drafted, and how many of them accepted


@given(ROW_STEPS)
def test_acceptance_by_place_is_what_counting_row_steps_gives(row_steps: list[tuple[int, int]]) -> None:
    acceptance = Counter(str(accepted + 1) for _, accepted in row_steps)
    drafted = Counter(str(length) for length, _ in row_steps)
    found = accepted_by_position(acceptance, drafted)
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


def test_the_least_of_batches_by_hand() -> None:
    assert least_of_batches([3.0, 2.0, 5.0, 4.0, 1.0]) == {1: 3.0, 2: 3.0, 4: 2.0}
