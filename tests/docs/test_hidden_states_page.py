"""The drafter on the page about hidden states finds similar places, and changes no token."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from emssd import Engine
from emssd.drafting import Draft, HiddenStates, Outcome
from emssd.sequences import Batch, Request, Row
from emssd.testing.models import tiny_model
from emssd.testing.oracle import greedy_reference

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]
PROMPTS = [[1, 5, 6, 5, 7, 5], [9], [3] * 20, [8, 2, 8, 4, 8]]


def similar_places() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "similar_places.py"))["SimilarPlaces"]()


def heard(start: int, *states: tuple[float, float]) -> Outcome:
    hidden = HiddenStates(("a",), (start,), (0, len(states)), (-1,), (torch.tensor(states),))
    return Outcome(Batch(()), Draft.empty(0), (), (), hidden=hidden)


def test_it_drafts_what_followed_the_most_similar_place() -> None:
    drafter, row = similar_places(), Row(Request("a", (1, 2, 3, 4, 5), 9))
    drafter.observe(heard(0, (1.0, 0.0), (0.0, 1.0)))
    drafter.observe(heard(2, (0.0, -1.0), (0.9, 0.1)))
    assert drafter.propose(Batch((row,)), [3]).token_ids.tolist() == [3, 4, 5]
    assert drafter.propose(Batch((row,)), [1]).token_ids.tolist() == [3]
    drafter.release(["a"])
    assert drafter.propose(Batch((row,)), [3]).token_ids.tolist() == []


def test_its_tokens_are_those_of_greedy_decoding_and_drafts_are_accepted() -> None:
    model = tiny_model(max_model_len=64, std=0.12)  # repeats itself before long
    engine = Engine.from_model(model, drafter=similar_places(), batch_size=3, on_drafter_error="fail")
    outputs = engine.generate(PROMPTS, 30, ignore_eos=True)
    assert [list(output.token_ids) for output in outputs] == [greedy_reference(model, prompt, 30) for prompt in PROMPTS]
    assert 0 < engine.report.num_accepted < engine.report.num_drafted
