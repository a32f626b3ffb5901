"""`auto` chooses by model, machine and batch; weights are rounded when few rows run, and no token changes (float64)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import emssd_auto
import pytest
import torch
from emssd_auto import AutoConfig, FewRows
from emssd_testing.drafters import PerfectDrafter

from emssd.decoding.engine import Engine
from emssd.drafting import Draft, Outcome
from emssd.model import BorrowedTarget
from emssd.sequences import Batch, Request, Row
from tests.support.right_drafters import decode, target

DRAFTS = PerfectDrafter(9, references={(1, 2, 3): [1] * 9})
WHY: dict[str | None, dict[str, Any]] = {
    None: {},
    "the model is not on a CPU, whole": {"device": torch.device("cuda:0")},
    "the model is not compiled": {"has_program": False},
    "the model has 255 MiB": {"mib": 255},
}


@pytest.mark.parametrize("why", WHY)
def test_rounded_weights_draft_where_reading_weights_takes_most_of_a_step(why: str | None) -> None:
    machine = {"device": torch.device("cpu"), "has_program": True, "mib": 256} | WHY[why]
    weights = [torch.empty(machine["mib"] << 20, dtype=torch.int8, device="meta")]
    lent = SimpleNamespace(model=SimpleNamespace(parameters=lambda: weights, buffers=list), **machine)
    context: Any = SimpleNamespace(target=lent, make_drafter=lambda *_: DRAFTS)
    assert emssd_auto.why_not_self(context) == why
    (spec,) = emssd_auto.emssd_drafters()
    assert len(spec.build(AutoConfig(), context)) == (2 if why is None else 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "drafting", "made"),
    [
        ([1, 4, 4], [1, 2], 0),
        ([5, *[4] * 30, 5, *[1] * 67], [97, 98], 96),  # the 65th step of few rows since there were more
        ([1, 1, 5, 5, 1, 1, 1], [1, 5, 6], 0),
    ],
)
def test_it_is_made_when_few_rows_run_and_waits_while_there_are_more(
    numbers: list[int], drafting: list[int], made: int
) -> None:
    steps, made_in = list[int](), list[int]()
    few = FewRows(lambda: made_in.append(len(steps)) or DRAFTS)  # type: ignore[func-returns-value]
    for number in numbers:
        batch = Batch(tuple(Row(Request(str(row), (1, 2, 3), 50)) for row in range(number)))
        asked = few.num_speculative_tokens  # it is not asked for nothing
        draft = few.propose(batch, [asked] * number) if asked else Draft.empty(number)
        few.observe(Outcome(batch, draft, (), ()))
        steps.append(draft.lengths[0])
    assert [step for step, length in enumerate(steps) if length] == drafting
    assert made_in == [made]


def test_rounded_weights_that_are_made_in_a_run_draft_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emssd_auto, "_LEAST_BYTES", 0)
    monkeypatch.setattr(BorrowedTarget, "has_program", True)
    engine = Engine.from_model(target().model, drafter=AutoConfig(), budget="fixed", batch_size=4)
    decode(engine)
    suffix, few = engine.drafting.drafters
    assert few.num_accepted > 0
    assert engine.drafting.summary.startswith(f"suffix drafted {suffix.num_drafted} tokens (")
    assert f"; self drafted {few.num_drafted} tokens (" in engine.drafting.summary
