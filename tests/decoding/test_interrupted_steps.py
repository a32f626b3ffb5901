"""What finished in a step that fails is kept, and a model that exits ends its run alone.

After an error at any place the next steps are right: `tests/attack/test_attack.py` has that.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from unittest.mock import Mock

import pytest

from emssd.drafting import Draft, Drafter, Outcome
from emssd.errors import PluginError
from emssd.sequences import Batch
from tests.support.oracle import build


class FailsBehindTheLastStep(Drafter):
    num_speculative_tokens = 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.empty(len(batch))

    def observe(self, outcome: Outcome) -> None:
        if any(row.finish_reason is not None for row in outcome.batch):
            raise ZeroDivisionError


def test_rows_that_finish_in_a_step_that_fails_behind_its_tokens_are_not_lost(
    oracle: Any, make_ragged: Any, prompts: list[list[int]]
) -> None:
    engine = build(oracle, make_ragged, FailsBehindTheLastStep(), on_drafter_error="fail")
    with pytest.raises(PluginError, match="failed in observe") as caught:
        engine.generate(prompts[:2], [4, 9])
    assert [row.token_ids for row in caught.value.finished] == [oracle.reference(prompts[0], 4)]
    assert not engine.has_work
    assert engine.runner.usage.held == 0


def test_a_model_that_exits_does_not_end_the_process(
    oracle: Any, make_ragged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(oracle, make_ragged, FailsBehindTheLastStep())
    monkeypatch.setattr(engine.runner.backend, "plan", Mock(side_effect=SystemExit(0)))
    with pytest.raises(PluginError, match=r"the model or the backend called sys.exit\(0\) in a step"):
        engine.generate([[1, 2]], 3)
