"""The drafter `none` drafts nothing, whatever the budget."""

from __future__ import annotations

import pytest
from emssd_none import NoneConfig, NoneDrafter
from emssd_testing.models import tiny_model

from emssd import Engine
from emssd.sequences import Batch, Request, Row


@pytest.mark.parametrize("num_rows", [1, 3])
def test_it_drafts_nothing_for_every_row(num_rows: int) -> None:
    rows = tuple(Row(Request(str(i), (3, 4), 5)) for i in range(num_rows))
    draft = NoneDrafter().propose(Batch(rows), [7] * num_rows)
    assert draft.lengths == [0] * num_rows
    assert draft.token_ids.numel() == 0


def test_every_step_gives_one_token_of_the_targets_own() -> None:
    engine = Engine.from_model(tiny_model(), drafter=NoneConfig())
    (generation,) = engine.generate([[3, 4, 5]], 6, ignore_eos=True)
    assert len(generation.token_ids) == generation.num_steps == 6
    assert generation.num_drafted == 0
    assert engine.report.mean_acceptance_length == 1.0
