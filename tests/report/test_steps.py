"""Steps of other drafters, budgets or prompts are no repeats of each other, and what is drafted is said as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emssd.report.rows import Row
from emssd.report.sections.step_time import step_time
from emssd.report.sources import read
from emssd.report.steps import Steps, steps_of

from .conftest import row, value, write

WRONG = "wrong throughout"


def timed(*changes: dict[str, Any]) -> list[Row]:
    """Two repeats of each."""
    return [row("step_time", None, repeat=repeat, replay="p", **each) for each in changes for repeat in (1, 2)]


def prompts(number: int) -> dict[str, Any]:
    """Samples of so many prompts."""
    return {
        "samples": {"num_prompt_tokens": [50] * number, "num_new_tokens": [64] * number, "acceptance_length": [1.0]}
    }


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([{"drafter_options": f"replay(p={p}, num_speculative_tokens=3)"} for p in (0, 0.9)], ["(p=0)", "(p=0.9)"]),
        ([{"budget_options": budget} for budget in ("fixed", "adaptive")], ["budget fixed", "budget adaptive"]),
        ([prompts(number) for number in (4, 16)], ["200 tokens of prompts", "800 tokens of prompts"]),
    ],
)
def test_runs_of_other_options_are_not_pooled(changes: list[dict[str, Any]], names: list[str]) -> None:
    found = steps_of(timed(*changes))
    assert [count(steps) for steps in found] == [2, 2]
    assert all(steps.name.endswith(name) for steps, name in zip(found, names, strict=True))


def test_drafted_tokens_and_prompts_that_follow_the_batch_size_are_one_setting() -> None:
    labels = ("replay(num_speculative_tokens=3)", "replay", "replay(num_speculative_tokens=1)")
    made = [{"batch_size": size, "drafter_options": label, **prompts(size)} for size in (1, 4) for label in labels]
    (steps,) = steps_of(timed(*made))
    assert steps.title == "demo · float32 · padded (replay)"


def test_drafts_are_called_wrong_only_where_they_are(tmp_path: Path) -> None:
    def said(acceptance_length: float) -> str:
        write(tmp_path, [value("step_time", None, replay="p", metrics_mean_acceptance_length=acceptance_length)])
        section = step_time(read([tmp_path]))
        assert section is not None
        return " ".join(block for block in section.blocks if isinstance(block, str))

    assert WRONG in said(1.0)
    assert WRONG not in said(1.5)
    assert "accepted in part, with a mean acceptance length of up to 1.50" in said(1.5)


def count(steps: Steps) -> int:
    """Of rows in the only cell."""
    ((rows,),) = (sizes.values() for sizes in steps.cells.values())
    return len(rows)
