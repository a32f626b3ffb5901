"""How many steps a run has to do at most, by which ``model.compile=auto`` decides."""

from __future__ import annotations

import pytest

from emssd.cli.config import RunConfig
from emssd.cli.job import _most_steps
from emssd.data.prompts import Prompt


@pytest.mark.parametrize(
    ("limits", "batch_size", "steps"),
    [([30], 8, 30), ([30] * 9, 8, 60), ([4, 4, 30, 4], 2, 34), ([5, 10**400], 2, 96), ([], 8, 0)],
)
def test_each_row_begins_where_the_first_one_ends(limits: list[int], batch_size: int, steps: int) -> None:
    prompts = [Prompt(str(number), max_new_tokens=limit) for number, limit in enumerate(limits)]
    assert _most_steps(RunConfig(batch_size=batch_size), prompts, 96) == steps
