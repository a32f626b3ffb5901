"""The drafters that the pages about trees and hidden states show are what they are said to be."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.decoding.engine import Engine
from emssd.drafting import Draft, HiddenStates, Outcome
from emssd.model import TargetModel
from emssd.sequences import Batch, Request, Row
from tests.support.backends import BACKENDS, engine_of

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]
PROMPTS = [[1, 5, 6, 5, 7, 5], [9], [3] * 20, [8, 2, 8, 4, 8]]


def two_ways() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "two_ways.py"))["TwoWays"]()


def test_it_drafts_what_the_page_says() -> None:
    row = Row(Request("a", (1, 5, 6, 5, 7, 5), 9))
    draft = two_ways().propose(Batch((row,)), [3])
    assert (draft.token_ids.tolist(), draft.parents) == ([7, 6, 5], (-1, -1, 0))


def test_its_tokens_are_those_of_greedy_decoding_and_trees_are_accepted() -> None:
    model = tiny_model(max_model_len=64)
    drafter = two_ways()
    drafts, ways = list[Draft](), list[list[int]]()

    def observe(outcome: Outcome) -> None:
        drafts.append(outcome.draft)
        ways.extend(list(nodes) for nodes in outcome.accepted)

    drafter.observe = observe
    engine = engine_of(TargetModel(model), drafter, BACKENDS["paged-grows"]())
    outputs = engine.generate(PROMPTS, 30, ignore_eos=True)
    assert [list(output.token_ids) for output in outputs] == [greedy_reference(model, prompt, 30) for prompt in PROMPTS]
    assert any(not draft.is_chain for draft in drafts)
    assert any(ways)


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
