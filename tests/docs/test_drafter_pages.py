"""The drafters that the pages about trees and hidden states show are what they are said to be."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from emssd.drafting import Draft, HiddenStates, Outcome
from emssd.sequences import Batch, Request, Row

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]


def two_ways() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "two_ways.py"))["TwoWays"]()


def test_it_drafts_what_the_page_says() -> None:
    row = Row(Request("a", (1, 5, 6, 5, 7, 5), 9))
    draft = two_ways().propose(Batch((row,)), [3])
    assert (draft.token_ids.tolist(), draft.parents) == ([7, 6, 5], (-1, -1, 0))


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
