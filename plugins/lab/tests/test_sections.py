"""The tables and plots of sections, against their definitions and against sums done by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from math import log2
from typing import Any

import pytest
from emssd_lab.report.cells import Spread, frame
from emssd_lab.report.sections import Plot
from emssd_lab.report.sections.acceptance import _accepted_by_position, _least_of_batches
from emssd_lab.report.sections.methods import crossing_at
from emssd_lab.report.sections.steps import floors, steps_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.tiers import looped

from .conftest import row, section_of, tables_of, value

pytestmark = pytest.mark.usefixtures("undrawn")


@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(st.integers(1, 64), st.integers(1, 200), st.floats(1e9, 1e12), st.floats(1e9, 1e15))
def test_arithmetic_takes_over_where_it_says(batch: int, tokens: int, bandwidth: float, rate: float) -> None:
    provenance = value()["provenance"]
    provenance["hardware"] |= {"bytes_per_second": bandwidth, "flops_per_second": rate}
    mine = row(batch_size=batch, metrics_decode_computed_tokens=10 * batch * tokens, provenance=provenance)
    floor = floors(frame([mine])).iloc[0]
    assume(abs(floor.bytes - floor.FLOPs) > 1e-9 * floor.seconds)
    assert (floor.bound == "FLOPs") == (tokens >= floor["from"])


def test_the_time_of_a_step_is_shown_by_phase_beside_its_floor() -> None:
    (table,) = tables_of([value("fig1", "vanilla", metrics_decode_tokens_per_second=1000.0)], "time")
    # 10 steps of 2 rows in 10 ms for each of the six phases; 2 new tokens for each row and step. A step reads 4 MB of
    # weights and 200 tokens of KV at 2 kB with 10 GB/s: 0.44 ms for 4 new tokens, so 9,091 tokens/s
    assert dict(zip(table.columns, table.lines[0], strict=True)) == {
        "batch": "2", "method": "vanilla", "tokens / row and step": "2.00", "rows / step": "2.00", "ms / step": "6.00",
        "schedule": "1.00", "draft": "1.00", "plan": "1.00", "forward": "1.00", "verify": "1.00", "other": "1.00",
        "floor, ms": "0.44", "× floor": "9.09", "floor bound by": "bytes", "by FLOPs from, tokens / row": "11",
    }  # fmt: skip


def prompts(number: int) -> dict[str, Any]:
    """Samples of so many prompts."""
    lengths = {"num_prompt_tokens": [50] * number, "num_new_tokens": [64] * number, "acceptance_length": [1.0]}
    return {"samples": lengths}


@looped(
    "changes, names",
    [
        (
            [{"drafter_options": f"replay(p={p}, num_speculative_tokens=3)"} for p in (0, 0.9)],
            ["(p=0), fixed on padded", "(p=0.9), fixed on padded"],
        ),
        ([{"budget_options": budget} for budget in ("fixed", "adaptive")], ["fixed on padded", "adaptive on padded"]),
        ([prompts(number) for number in (4, 16)], ["demo, 4 prompts", "demo, 16 prompts"]),
        (  # drafted tokens, and prompts that follow the batch size, are one setting
            [{"batch_size": size, "drafter_options": f"replay{options}", **prompts(size)} for size, options
             in product((1, 4), ("(num_speculative_tokens=3)", "", "(num_speculative_tokens=1)"))],
            ["demo · replay, fixed on padded · demo · float32"],
        ),
    ],
)  # fmt: skip
def test_steps_of_other_drafters_budgets_or_prompts_are_not_pooled(
    changes: list[dict[str, Any]], names: list[str]
) -> None:
    rows = [row("step_time", None, repeat=i, replay="p", **change) for change in changes for i in (1, 2)]
    steps = steps_of(frame(rows))
    assert [len(grid.rows) for grid in steps] == [2 * len(changes) // len(names)] * len(names)
    assert all(name in grid.name for grid, name in zip(steps, names, strict=True))


@looped("inputs, ratio, inputs_on_top", [(120, "0.80", "1.20"), (160, "1.07", "1.20")])
def test_which_unpadding_gains_more_is_a_ratio_within_repeats(inputs: float, ratio: str, inputs_on_top: str) -> None:
    rates = {"greedy": 100, "vanilla": 110, "unpad_kv": 150, "unpad_inputs": inputs, "unpad_both": 180}
    rows = [
        value("ablation", name, repeat=repeat, batch_size=8, metrics_decode_tokens_per_second=rate * repeat)
        for repeat in (1, 2, 3)  # how fast the machine was does not matter
        for name, rate in rates.items()
    ]
    speeds, balance = tables_of(rows, "ablation")
    line = dict(zip(balance.columns, balance.lines[0], strict=True))
    assert line == {
        "batch": "8",
        "inputs ÷ KV": f"{ratio} ({ratio}–{ratio})",
        "KV on top of inputs": f"{180 / inputs:.2f} ({180 / inputs:.2f}–{180 / inputs:.2f})",
        "inputs on top of KV": f"{inputs_on_top} ({inputs_on_top}–{inputs_on_top})",
        "inputs ÷ KV in the paper": f"{2.02 / 1.47:.2f}",
    }
    over_vanilla = {line[1]: line[list(speeds.columns).index("÷ vanilla")] for line in speeds.lines}
    alone = {"unpad KV": 150 / 110, "unpad inputs": inputs / 110, "EMS-SD (both unpadded)": 180 / 110}
    assert over_vanilla == {"greedy": "", "vanilla": ""} | {
        name: f"{gain:.2f} ({gain:.2f}–{gain:.2f})" for name, gain in alone.items()
    }
    # a padded input is 2 MFLOP at 100 GFLOP/s, a lost slot 2 kB at 10 GB/s
    text = section_of(rows, "ablation").markdown()
    assert "costs 20 µs of arithmetic" in text
    assert "costs 0.2 µs of reading in every later step, which is as much after 100 steps" in text


PLAIN, ALWAYS, ADAPTIVE = (False, "fixed"), (True, "fixed"), (True, "adaptive")  # speculate, budget


def crossover(*rates: dict[tuple[bool, str], float], batch_size: int = 8) -> list[dict[str, Any]]:
    """Rows of lines with these tokens/s, of one repeat after the other."""
    return [
        value("crossover", None, repeat=repeat, batch_size=batch_size, speculate=speculate, budget_options=budget,
              metrics_decode_tokens_per_second=rate)
        for repeat, mine in enumerate(rates, 1)
        for (speculate, budget), rate in mine.items()
    ]  # fmt: skip


def test_never_slower_has_the_worst_cell_first_and_its_errors() -> None:
    rows = crossover({PLAIN: 100, ALWAYS: 90, ADAPTIVE: 99}, {PLAIN: 200, ALWAYS: 180, ADAPTIVE: 198})
    rows += crossover({PLAIN: 100, ALWAYS: 200, ADAPTIVE: 180}, {PLAIN: 100, ALWAYS: 200, ADAPTIVE: 184}, batch_size=4)
    rows += crossover({PLAIN: 100, ADAPTIVE: 98}, batch_size=2)
    cells, *_ = tables_of([{**row, "experiment": "never_slower"} for row in rows], "never_slower")
    assert [line[1:] for line in cells.lines] == [
        ["4", "1.820 ± 0.040", "0.910 ± 0.020"],
        ["2", "0.980 ± inf", "0.980 ± inf"],
        ["8", "0.990 ± 0.000", "0.990 ± 0.000"],
    ]


@given(st.floats(1.05, 60), st.floats(0.05, 0.5))
def test_a_line_that_is_straight_on_a_logarithmic_scale_crosses_where_it_does(at: float, slope: float) -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    medians = {size: 1 - slope * (log2(size) - log2(at)) for size in sizes}
    assert crossing_at({size: Spread(y, y, y, 3) for size, y in medians.items()}) == pytest.approx(at)


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
    rows = [
        made
        for size, ratios in by_size.items()
        for made in crossover(*({PLAIN: 1.0, ALWAYS: ratio} for ratio in ratios), batch_size=size)
    ]
    assert tables_of(rows, "crossover")[0].lines == [["fixed on padded", *shown]]


def test_speed_and_acceptance_of_each_drafter_by_batch_size() -> None:
    rates = {"none": 100.0, "draft_model": 150.0, "draft_model(tree=dynamic)": 180.0}
    rows = [
        value(
            "trees", None, repeat=repeat, batch_size=size, speculate=name != "none", drafter_options=name,
            metrics_decode_tokens_per_second=rate / (size if name != "none" else 1), backend_options="ragged",
        )
        for repeat in (1, 2) for size in (1, 2) for name, rate in rates.items()
    ]  # fmt: skip
    speeds, shares = tables_of(rows, "trees")
    assert speeds.columns == ["drafter", "1", "2"]
    assert speeds.lines == [
        ["draft_model", "1.50 (1.50–1.50)", "0.75 (0.75–0.75)"],
        ["draft_model(tree=dynamic)", "1.80 (1.80–1.80)", "0.90 (0.90–0.90)"],
    ]
    # of 20 row-steps 16 drafted 4 tokens, and 10 accepted 2
    assert shares.lines == [[name, *["2.00 (3.2, 31%)"] * 2] for name in list(rates)[1:]]
    assert sum(isinstance(block, Plot) for block in section_of(rows, "trees").blocks) == 1
    assert section_of([made for made in rows if not made["speculate"]], "trees") is None


ROW_STEPS = st.lists(
    st.integers(0, 7).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), min_size=1
)  # how many tokens were drafted, and how many of them accepted


@given(ROW_STEPS)
def test_acceptance_by_place_is_what_counting_row_steps_gives(row_steps: list[tuple[int, int]]) -> None:
    accepted_counts = Counter(accepted + 1 for _, accepted in row_steps)
    drafted = Counter(length for length, _ in row_steps)
    shares = _accepted_by_position(accepted_counts, drafted)
    assert list(shares) == list(range(1, max(length for length, _ in row_steps) + 1))
    for depth, share in shares.items():
        reached = [accepted for length, accepted in row_steps if length >= depth]
        assert share == pytest.approx(sum(accepted >= depth for accepted in reached) / len(reached))


@given(st.lists(st.floats(1, 8), min_size=1, max_size=70))
def test_the_least_of_a_batch_falls_as_batches_are_joined(taus: list[float]) -> None:
    shares = _least_of_batches(taus)
    assert shares[1] == pytest.approx(sum(taus) / len(taus))
    assert max(shares) <= len(taus)
    full = taus[: len(taus) // 32 * 32]  # the same samples in batches of 1 to 32
    nested = _least_of_batches(full)
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size in nested]
    assert all(nested[a] >= nested[b] - 1e-9 for a, b in pairwise(sizes))
