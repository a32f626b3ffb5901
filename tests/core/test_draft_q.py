"""The distributions of a draft stay with its nodes, whatever is picked, cut or joined, and wrong ones are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft, Drafter
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter, check_draft, own_draft
from emssd.drafting.stages import DraftStages
from emssd.errors import DraftError
from emssd.sequences import Batch, Request, Row
from tests.support.tiers import looped

VOCAB = 7


@st.composite
def marked(draw: st.DrawFn, num_rows: int = 3) -> Draft:
    """A draft whose distributions tell row and node: the first entry is ``100 · row + node``, -1 for the origin."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=num_rows, max_size=num_rows))
    trees = [[(draw(st.integers(0, VOCAB - 1)), draw(st.integers(-1, node - 1))) for node in range(n)] for n in sizes]
    known = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    q = [
        tuple(torch.full((VOCAB,), 100.0 * row + node) for node in range(-1, size)) if is_known else None
        for row, (size, is_known) in enumerate(zip(sizes, known, strict=True))
    ]
    return replace(Draft.from_trees(trees), q=tuple(q))


def marks(draft: Draft, row: int) -> list[float] | None:
    q = None if draft.q is None else draft.q[row]
    return None if q is None else [float(each[0]) for each in q]


@given(marked(), st.data())
def test_picked_nodes_keep_their_own(draft: Draft, data: st.DataObject) -> None:
    picked = list[list[int]]()
    for row in range(3):
        nodes = list[int]()
        for node, parent in enumerate(draft.tree(row)):
            if (parent < 0 or parent in nodes) and data.draw(st.booleans()):
                nodes.append(node)
        picked.append(nodes)
    found = draft.pick(picked)
    assert draft.q is not None
    for row, nodes in enumerate(picked):
        expected = None if draft.q[row] is None else [100.0 * row + node for node in (-1, *nodes)]
        assert marks(found, row) == expected


@given(marked(), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_cuts_and_copies_keep_them(draft: Draft, limits: list[int]) -> None:
    lengths = [min(limit, length) for limit, length in zip(limits, draft.lengths, strict=True)]
    for found in (draft.cut(lengths), draft.shallow(limits), draft.within(VOCAB), own_of(draft)):
        for row, (start, stop) in enumerate(pairwise(found.indptr)):
            told = marks(found, row)
            assert told is None or len(told) == 1 + stop - start
            assert (told is None) == (marks(draft, row) is None)


def own_of(draft: Draft) -> Draft:
    rows = Batch(tuple(Row(Request(str(row), (1,), 20)) for row in range(draft.num_rows)))
    return own_draft(draft, rows, [9] * draft.num_rows, VOCAB, trees=True)


class Given(Drafter):
    drafts_trees, num_speculative_tokens = True, 9

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return self._draft.cut([min(limit, length) for limit, length in zip(budget, self._draft.lengths, strict=True)])


@given(marked(), marked())
def test_joined_rows_have_that_of_who_drafted_them(one: Draft, other: Draft) -> None:
    assert other.q is not None
    other = replace(other, q=tuple(None if q is None else tuple(each + 1000 for each in q) for q in other.q))
    rows = Batch(tuple(Row(Request(str(row), (1,), 20)) for row in range(3)))
    drafters = [CheckedDrafter(Given(each), None, VOCAB, on_error="fail") for each in (one, other)]
    found = DraftStages(drafters, FixedBudget()).propose(rows, (9, 9, 9), 0)
    for row in range(3):
        source = next((each for each in (one, other) if each.lengths[row]), None)
        assert marks(found, row) == (None if source is None else marks(source, row)) or not found.lengths[row]


UNIT = torch.full((VOCAB,), 1 / VOCAB)


@looped(
    ("q", "message"),
    [
        ((), "its draft has q for 0 rows of 1; give None where there is none"),
        (((UNIT, UNIT),), "its q has 2 distributions for a row of 2 tokens; give one behind the newest token, and"),
        (
            ((UNIT, UNIT[1:], UNIT),),
            r"its q has a tensor of shape \[6\] and torch.float32 behind a token with children",
        ),
        (((UNIT, UNIT * math.nan, UNIT),), "its q has NaN or inf behind a token with children; give 7 probabilities"),
        (((UNIT.long(), UNIT, UNIT),), r"shape \[7\] and torch.int64 behind a token with children; give 7 prob"),
    ],
)
def test_distributions_that_cannot_be_are_refused(q: tuple[Seq[torch.Tensor] | None, ...], message: str) -> None:
    draft, rows = replace(Draft.from_chains([[1, 2]]), q=q), Batch((Row(Request("first", (1,), 9)),))
    with pytest.raises(DraftError, match=message):
        check_draft(draft, rows, [2], VOCAB)


def test_leaves_need_none() -> None:
    draft, rows = Draft.from_chains([[1, 2]]), Batch((Row(Request("first", (1,), 9)),))
    check_draft(replace(draft, q=((UNIT, UNIT, torch.empty(0)),)), rows, [2], VOCAB)
    check_draft(replace(draft, q=(None,)), rows, [2], VOCAB)
