"""Steps of other drafters, budgets or prompts are no repeats of each other, and what is drafted is said as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emssd.report.rows import Row
from emssd.report.sections.steps import steps_of
from tests.support.tiers import looped

from .conftest import row, section_of, value, write


def timed(*changes: dict[str, Any]) -> list[Row]:
    """Two repeats of each."""
    return [row("step_time", None, repeat=repeat, replay="p", **each) for each in changes for repeat in (1, 2)]


def prompts(number: int) -> dict[str, Any]:
    """Samples of so many prompts."""
    return {
        "samples": {"num_prompt_tokens": [50] * number, "num_new_tokens": [64] * number, "acceptance_length": [1.0]}
    }


@looped(
    "changes, names",
    [
        (
            [{"drafter_options": f"replay(p={p}, num_speculative_tokens=3)"} for p in (0, 0.9)],
            ["(p=0), fixed on padded", "(p=0.9), fixed on padded"],
        ),
        ([{"budget_options": budget} for budget in ("fixed", "adaptive")], ["fixed on padded", "adaptive on padded"]),
        ([prompts(number) for number in (4, 16)], ["demo, 4 prompts", "demo, 16 prompts"]),
    ],
)
def test_runs_of_other_options_are_not_pooled(changes: list[dict[str, Any]], names: list[str]) -> None:
    found = steps_of(timed(*changes))
    assert [len(grid.rows) for grid in found] == [2, 2]
    assert all(name in grid.name for grid, name in zip(found, names, strict=True))


@looped("longest", [1.0, 1.5])
def test_the_largest_acceptance_length_is_shown(longest: float, tmp_path: Path) -> None:
    lengths = (1.0, longest)
    rows = [value("step_time", None, repeat=i, metrics_mean_acceptance_length=tau) for i, tau in enumerate(lengths)]
    write(tmp_path, rows)
    section = section_of(tmp_path, "step_time")
    assert section is not None
    assert f"the largest mean acceptance length of a run is {longest:.2f} " in section.markdown()


def test_drafted_tokens_and_prompts_that_follow_the_batch_size_are_one_setting() -> None:
    labels = ("replay(num_speculative_tokens=3)", "replay", "replay(num_speculative_tokens=1)")
    made = [{"batch_size": size, "drafter_options": label, **prompts(size)} for size in (1, 4) for label in labels]
    (grid,) = steps_of(timed(*made))
    assert grid.title == "demo · replay, fixed on padded · demo · float32 (replay)"
