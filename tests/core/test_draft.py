"""Drafts and the rules that a drafter is held to, with the sentence that each broken rule gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft
from emssd.drafting.rules import check_draft
from emssd.errors import DraftError, PluginError
from emssd.sequences import Batch, Request, Sequence
from tests.support.strategies import drafts

BATCH = Batch((Sequence(Request("first", (1,), 9)), Sequence(Request("second", (2, 3), 9))))


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_chains_come_back_row_by_row(chains: list[list[int]]) -> None:
    draft = Draft.from_chains(chains)
    assert draft.num_rows == len(chains)
    assert draft.lengths == [len(chain) for chain in chains]
    assert draft.indptr[0] == 0
    assert [draft.token_ids[a:b].tolist() for a, b in zip(draft.indptr, draft.indptr[1:], strict=False)] == chains
    assert draft.token_ids.dtype == torch.int64
    assert draft.is_chain


@given(st.integers(0, 6))
def test_empty_drafts_nothing_for_every_row(num_rows: int) -> None:
    draft = Draft.empty(num_rows)
    assert (draft.num_rows, draft.lengths, draft.token_ids.tolist()) == (num_rows, [0] * num_rows, [])


@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.data())
def test_every_draft_within_the_budget_passes(budget: list[int], data: st.DataObject) -> None:
    check_draft(data.draw(drafts(budget, 10)), BATCH, budget, 10)


@pytest.mark.parametrize(
    ("parents", "is_chain"),
    [
        (None, True),
        ((-1, 0, -1, 0, 1), True),
        ((-1, -1, -1, 0, 1), False),
        ((-1, 0, -1, 0, 0), False),
        ((-1, 0, 1, 2, 3), False),
    ],
)
def test_parents_count_within_the_row_and_tell_chains_from_trees(
    parents: tuple[int, ...] | None, is_chain: bool
) -> None:
    assert Draft(torch.arange(5), (0, 2, 5), parents).is_chain is is_chain


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft.from_chains([[1]]), r"its draft has 1 rows over 1 tokens \(indptr \(0, 1\)\), but the batch has 2 rows"),
        (Draft.empty(3), "its draft has 3 rows over 0 tokens .*return one chain or tree, possibly empty, per row"),
        (Draft(torch.arange(3), (0, 1, 2)), "its draft has 2 rows over 3 tokens"),
        (Draft(torch.arange(2), (1, 1, 2)), "its draft has 2 rows over 2 tokens"),
        (Draft(torch.arange(2), ()), "its draft has -1 rows over 2 tokens"),
        (Draft.from_chains([[1], [1, 2, 3]]), "it drafted 3 tokens for request 'second' with a budget of 2"),
        (Draft.from_chains([[1, 1, 1, 1], []]), "it drafted 4 tokens for request 'first' with a budget of 3"),
        (Draft(torch.arange(1), (0, 3, 1)), "it drafted -2 tokens for request 'second' with a budget of 2"),
        (
            Draft(torch.arange(2), (0, 2, 2), (-1, -1)),
            "it drafted a token tree.*or set drafts_trees = True",
        ),
        (Draft.from_chains([[1], [10]]), "it drafted token id 10, outside the target's vocabulary of 10; .* 0..9"),
        (Draft.from_chains([[-1], [3]]), "it drafted token id -1, outside the target's vocabulary of 10"),
    ],
)
def test_each_broken_rule_is_told_in_words(draft: Draft, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        check_draft(draft, BATCH, [3, 2], 10)


def test_a_broken_rule_is_a_plugin_error() -> None:
    assert issubclass(DraftError, PluginError)
