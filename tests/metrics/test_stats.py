"""Each metric is its formula, on steps made by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emssd.attention import KVUsage
from emssd.decoding.outcome import StepTimer
from emssd.metrics.stats import _NUM_TIMED_STEPS, PHASES, RunReport, StageStats, StepStats
from tests.support.tiers import looped


def phases(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0) | seconds


PREFILL = StepStats(
    is_prefill=True,
    num_rows=2,
    num_waiting=3,
    num_tokens=30,
    num_kv_tokens=30,
    num_new_tokens=2,
    drafted=(0, 0),
    acceptance=(1, 1),
    input_padding=10,
    kv_padding=10,
    num_preempted=0,
    num_adopted_tokens=40,
    seconds=phases(plan=0.5, forward=2.0, verify=0.25, other=0.25),
)
DECODE = StepStats(
    is_prefill=False,
    num_rows=2,
    num_waiting=1,
    num_tokens=9,
    num_kv_tokens=39,
    num_new_tokens=5,
    drafted=(5, 2),
    acceptance=(4, 1),
    input_padding=3,
    kv_padding=3,
    num_preempted=1,
    seconds=phases(draft=0.25, plan=0.25, forward=1.0, verify=0.25, other=0.25),
    stages=(StageStats(budget=(6, 2), drafted=(5, 2), seconds=0.1),),
    depths=(3, 2),
    drafted_by_depth=(3, 3, 1),
    confidence=((0.95, True), (1.0, True), (0.9, False), (0.25, False)),
)
LAST = DECODE._replace(  # 5 of 6 tokens count: a limit cut one off
    num_rows=1,
    num_waiting=0,
    num_tokens=6,
    num_kv_tokens=26,
    drafted=(5,),
    acceptance=(6,),
    input_padding=0,
    kv_padding=0,
    num_preempted=2,
    num_adopted_tokens=7,
    stages=(StageStats(budget=(5,), drafted=(5,), seconds=0.1), StageStats(budget=(0,), drafted=(0,), seconds=0.0)),
    depths=(5,),
    drafted_by_depth=(1, 1, 1, 1, 1),
    confidence=((0.2, True),),
)


def report_of(*steps: StepStats) -> RunReport:
    report = RunReport()
    for step in steps:
        report.add(step, batch_size=4)
    return report


VALUES = [
    ("decode_tokens_per_second", (5 + 5) / (2 + 2)),
    ("tokens_per_second", (2 + 5 + 5) / (3 + 2 + 2)),
    ("mean_acceptance_length", (1 + 1 + 4 + 1 + 6) / 5),
    ("acceptance_histogram", {"1": 3, "4": 1, "6": 1}),
    ("draft_length_histogram", {"0": 2, "2": 1, "5": 2}),
    ("draft_depth_histogram", {"2": 1, "3": 1, "5": 1}),
    ("drafted_by_depth", {"1": 4, "2": 4, "3": 2, "4": 1, "5": 1}),
    ("accepted_by_depth", {"1": 2, "2": 2, "3": 2, "4": 1, "5": 1}),
    ("drafted_by_confidence", {"0.2": 2, "0.9": 3}),
    ("accepted_by_confidence", {"0.2": 1, "0.9": 2}),
    ("draft_acceptance_rate", (3 + 0 + 5) / (5 + 2 + 5)),
    ("mean_draft_length", (5 + 2 + 5) / 5),
    ("padding_per_new_token", (3 + 3) / (5 + 5)),  # of decoding steps, as the padding ratio
    ("input_padding_tokens", 13),
    ("kv_padding_slots", 13),
    ("padding_ratio", ((4 - 2.5) / 4 + 0) / 2),
    ("batch_fill", (2 / 4 + 2 / 4) / 2),  # of steps with a queue
    ("num_preempted", 3),
    ("num_adopted_tokens", 47),
    ("num_steps", 3),
    ("num_row_steps", 5),
    ("num_computed_tokens", 30 + 9 + 6),
    ("decode_steps", 2),
    ("decode_row_steps", 3),
    ("decode_new_tokens", 10),
    ("decode_computed_tokens", 9 + 6),
    ("decode_kv_tokens", 39 + 26),
    ("decode_seconds", phases(draft=0.5, plan=0.5, forward=2.0, verify=0.5, other=0.5)),
    ("median_decode_step_seconds", 2.0),
    ("num_new_tokens", 12),
    ("num_allotted_tokens", (6 + 2) + 5),  # by all drafters that were asked
    ("num_drafted_tokens", 12),
    ("num_accepted_tokens", 8),
    ("kv_peak_bytes", 70),
    ("kv_peak_pool_bytes", 90),
    ("seconds", phases(draft=0.5, plan=1.0, forward=4.0, verify=0.75, other=0.75) | {"total": 7.0, "decode": 4.0}),
]


@looped(("name", "value"), VALUES)
def test_metric_is_its_formula(name: str, value: object) -> None:
    report = report_of(PREFILL, DECODE, LAST)
    report.kv_usage = KVUsage(held=5, peak_held=70, peak_pool=90)
    assert report.metrics()[name] == pytest.approx(value, rel=1e-12)


def test_an_engine_that_never_ends_keeps_the_seconds_of_its_latest_steps_only() -> None:
    slow = DECODE._replace(seconds={**DECODE.seconds, "forward": 100.0})
    report = report_of(*[slow] * 9, *[DECODE] * _NUM_TIMED_STEPS)
    assert report.decode.num_steps == _NUM_TIMED_STEPS + 9
    assert len(report.decode_step_seconds) == _NUM_TIMED_STEPS
    assert max(report.decode_step_seconds) < 100


def test_every_metric_is_checked_by_the_test_above_or_the_last_one() -> None:
    assert sorted([*(name for name, _ in VALUES), "acceptance"]) == sorted(RunReport().metrics())


def test_timer_splits_all_of_the_time_into_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0, 21.0, 100.0])
    monkeypatch.setattr("emssd.decoding.outcome.time.perf_counter", lambda: next(clock))
    timer = StepTimer()
    timer.lap("draft")
    timer.lap("forward", plan=3.0)  # of these seven seconds
    timer.lap("draft")
    seconds = timer.timed(PREFILL).seconds
    assert seconds == phases(draft=4.0, plan=3.0, forward=4.0, other=79.0)


def test_each_figure_has_a_formula_and_a_unit_on_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    described = {name for row in rows if len(row) == 3 for name in re.findall(r"`([^`]+)`", row[0])}
    metrics = report_of(PREFILL, DECODE, LAST).metrics()
    assert metrics.keys() - described == {"seconds"}
    assert {f"seconds.{name}" for name in metrics["seconds"]} <= described


def test_acceptance_as_vllm_speculators_and_specforge_define_it() -> None:
    acceptance = report_of(PREFILL, DECODE, LAST).metrics()["acceptance"]
    assert acceptance["vllm"] == {
        "mean_acceptance_length": 1 + 8 / 3,
        "per_position": [2 / 3, 2 / 3, 2 / 3, 1 / 3, 1 / 3],
    }
    assert acceptance["speculators"]["cond_acc"] == [2 / 3, 1, 1, 1 / 2, 1]
    assert (acceptance["speculators"]["eal"], acceptance["speculators"]["full_acc"]) == (
        1 + 8 / 3,
        acceptance["vllm"]["per_position"],
    )
    assert acceptance["specforge"] == {
        "accept_length": (2 + 5 + 5) / 3
    }  # the first tokens came without a pass to verify
    nothing = report_of(PREFILL).metrics()["acceptance"]
    assert nothing["vllm"] == {"mean_acceptance_length": 1.0, "per_position": []}
