"""Drafts and the rules that a drafter is held to, with the sentence that each broken rule gives."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from emssd_padded.backend import PaddedBackend
from emssd_residual.drafts import Drawn
from emssd_testing.drafters import RandomDrafter, TreeDrafter
from emssd_testing.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from emssd import Engine
from emssd.drafting import Draft
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.stages import DraftStages
from emssd.errors import DraftError, PluginError
from emssd.sequences import Batch, Request, Row
from tests.support.tiers import looped
from tests.support.told_drafter import Told

BATCH = Batch((Row(Request("first", (1,), 9)), Row(Request("second", (2, 3), 9))))


@looped(
    ("draft", "message"),
    [
        (Draft(torch.ones(1), (0, 1, 1)), "its token_ids are torch.float32 of 1 dimensions; give one int64 tensor"),
        (Draft(torch.tensor([[1]]), (0, 1, 1)), "its token_ids are torch.int64 of 2 dimensions"),
        (Draft.from_chains([[1]]), r"its draft has 1 rows over 1 tokens \(indptr \(0, 1\)\), but the batch has 2 rows"),
        (Draft.empty(3), "its draft has 3 rows over 0 tokens .*return one chain or tree, possibly empty, per row"),
        (Draft(torch.arange(3), (0, 1, 2)), "its draft has 2 rows over 3 tokens"),
        (Draft(torch.arange(2), (1, 1, 2)), "its draft has 2 rows over 2 tokens"),
        (Draft(torch.arange(2), ()), "its draft has -1 rows over 2 tokens"),
        (Draft.from_chains([[1], [1, 2, 3]]), "it drafted 3 tokens for request 'second' with a budget of 2"),
        (Draft.from_chains([[1, 1, 1, 1], []]), "it drafted 4 tokens for request 'first' with a budget of 3"),
        (Draft(torch.arange(1), (0, 3, 1)), "it drafted -2 tokens for request 'second' with a budget of 2"),
        (Draft(torch.arange(2), (0, 2, 2), (-1, -1)), "it drafted a token tree.*or set drafts_trees = True"),
        (Draft.from_chains([[1], [10]]), "it drafted token id 10, outside the target's vocabulary of 10; .* 0..9"),
        (Draft.from_chains([[-1], [3]]), "it drafted token id -1, outside the target's vocabulary of 10"),
    ],
)
def test_each_broken_rule_is_told_in_words(draft: Draft, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        draft.check(BATCH, [3, 2], 10)


NAN = float("nan")


def tree(*parents: int, second: tuple[int, ...] = (), confidence: tuple[float, ...] | None = None) -> Draft:
    """A draft for `BATCH` whose first row has these parents, and whose second row has those of `second`."""
    count = len(parents) + len(second)
    ids = torch.zeros(count, dtype=torch.int64)
    return Draft(ids, (0, len(parents), count), (*parents, *second), confidence)


@looped(
    ("draft", "message"),
    [
        (tree(0), "node 0 of its tree for request 'first' has parent 0; a parent is an earlier node of the same row"),
        (tree(-1, 2, 1), "node 1 of its tree for request 'first' has parent 2; .* or -1 for the row's newest token"),
        (tree(1, 0), "node 0 of its tree for request 'first' has parent 1; a parent is an earlier node"),
        (tree(-1, -2), "node 1 of its tree for request 'first' has parent -2; a parent is an earlier node"),
        (tree(-1, -1, second=(-1, 2)), "node 1 of its tree for request 'second' has parent 2; .* the same row"),
        (tree(*range(-1, 8)), "its tree for request 'first' has depth 9, .* may still generate 9 tokens; .*shallow"),
        (tree(*[-1] * 13), "it drafted 13 tokens for request 'first' with a budget of 12"),
        (Draft(torch.zeros(2, dtype=torch.int64), (0, 2, 2), (-1,)), "its draft has 1 parents for 2 tokens"),
        (tree(-1, -1, confidence=(0.5,)), "its draft has 1 confidence for 2 tokens; give one for each"),
        (tree(-1, -1, confidence=(0.5, NAN)), "its confidence has numbers outside of 0 to 1, or NaN"),
        (tree(-1, -1, confidence=(0.5, 1.01)), "its confidence has numbers outside of 0 to 1, or NaN"),
        (tree(-1, -1, confidence=(-0.1, 0.5)), "its confidence has numbers outside of 0 to 1, or NaN"),
        (tree(-1, 10**30), "node 1 of its tree .* has parent 1000000"),
    ],
)
def test_each_broken_rule_of_trees_is_told_in_words(draft: Draft, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        draft.check(BATCH, [12, 9], 10, trees=True)


def test_a_tree_of_a_drafter_that_announces_none_is_told_in_words() -> None:
    with pytest.raises(DraftError, match=r"a token tree for request 'second', and its drafts_trees is False; .*= True"):
        tree(-1, 0, second=(-1, -1)).check(BATCH, [12, 9], 10)


def test_a_row_that_may_generate_one_more_token_drafts_nothing() -> None:
    last = Batch((Row(Request("last", (1,), 1)),))
    Draft.empty(1).check(last, [4], 10, trees=True)
    with pytest.raises(DraftError, match="has depth 1, and the row may still generate 1 tokens"):
        Draft.from_trees([[(1, -1)]]).check(last, [4], 10, trees=True)


def test_a_backend_without_trees_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaddedBackend, "takes_trees", False)
    refusal = "backend 'padded' cannot serve this model: it takes no token trees, and the drafter drafts them"
    with pytest.raises(PluginError, match=refusal):
        Engine.from_model(tiny_model(), drafter=TreeDrafter(61), backend="padded")
    Engine.from_model(tiny_model(), drafter=RandomDrafter(61), backend="padded")


def test_confidence_is_given_in_the_shape_of_the_tokens() -> None:
    chains = Draft.from_chains([[1, 2], [], [3]], confidence=[[0.5, 1], (), [0.0]])
    assert chains.confidence == (0.5, 1.0, 0.0)
    trees = Draft.from_trees([[(1, -1), (2, -1)], [(3, -1)]], confidence=iter([[0.5, 0.25], [1.0]]))
    assert trees.confidence == (0.5, 0.25, 1.0)
    assert trees.cut([1, 1]).confidence == (0.5, 1.0)
    assert Draft.from_chains([[1]]).confidence is None
    assert Draft.from_trees([], confidence=[]).confidence == ()


@pytest.mark.parametrize(
    ("confidence", "refusal"),
    [
        ([[0.5], []], r"its confidence has rows of \[1, 0\] numbers, and its tokens rows of \[2, 1\]; give one each"),
        ([[0.5, 0.5]], r"rows of \[2\] numbers, and its tokens rows of \[2, 1\]"),
    ],
)
def test_confidence_of_another_shape_is_refused(confidence: Any, refusal: str) -> None:
    for make in (lambda: Draft.from_chains([[1, 2], [3]], confidence),
                 lambda: Draft.from_trees([[(1, -1), (2, 0)], [(3, -1)]], confidence)):  # fmt: skip
        with pytest.raises(DraftError, match=refusal):
            make()


VOCAB = 7


@st.composite
def marked(draw: st.DrawFn, num_rows: int = 3) -> Draft:
    """A draft whose extra tells row and node: the first entry is ``100 · row + node``, -1 for the origin."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=num_rows, max_size=num_rows))
    trees = [[(draw(st.integers(0, VOCAB - 1)), draw(st.integers(-1, node - 1))) for node in range(n)] for n in sizes]
    with_extra = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    extra = [
        Drawn(tuple(torch.full((VOCAB,), 100.0 * row + node) for node in range(-1, size))) if is_known else None
        for row, (size, is_known) in enumerate(zip(sizes, with_extra, strict=True))
    ]
    return replace(Draft.from_trees(trees), extra=tuple(extra))


def marks(draft: Draft, row: int) -> list[float] | None:
    extra: Any = None if draft.extra is None else draft.extra[row]
    return None if extra is None else [float(q[0]) for q in extra.q]


@given(marked(), st.data())
def test_picked_nodes_keep_their_own(draft: Draft, data: st.DataObject) -> None:
    picked = list[list[int]]()
    for row in range(3):
        nodes = list[int]()
        for node, parent in enumerate(draft.tree(row)):
            if (parent < 0 or parent in nodes) and data.draw(st.booleans()):
                nodes.append(node)
        picked.append(nodes)
    rows = Batch(tuple(Row(Request(str(row), (1,), 20)) for row in range(draft.num_rows)))
    picked_draft, copied = draft.pick(picked), draft.within(VOCAB).check(rows, [9] * len(rows), VOCAB, trees=True)
    for row, nodes in enumerate(picked):
        assert marks(copied, row) == marks(draft, row)
        assert marks(picked_draft, row) == (marks(draft, row) and [100.0 * row + node for node in (-1, *nodes)])


@given(marked(), marked())
def test_joined_rows_have_that_of_who_drafted_them(one: Draft, other: Draft) -> None:
    other = replace(
        other, extra=tuple(extra and Drawn(tuple(q + 1000 for q in extra.q)) for extra in other.extra or ())
    )
    rows = Batch(tuple(Row(Request(str(row), (1,), 20)) for row in range(3)))
    drafters = [CheckedDrafter(Told(part), None, VOCAB, on_error="fail") for part in (one, other)]
    joined = DraftStages(drafters, FixedBudget()).propose(rows, (9, 9, 9), 0)
    for row in range(3):
        source = next((part for part in (one, other) if part.lengths[row]), None)
        assert marks(joined, row) == (None if source is None else marks(source, row)) or not joined.lengths[row]


UNIT = torch.full((VOCAB,), 1 / VOCAB)


@looped(
    ("extra", "message"),
    [
        ((), "its draft has extra for 0 rows of 1; give None where there is none"),
        ([(UNIT, UNIT)], "its q has 2 distributions for a row of 2 tokens; give one behind the newest token, and"),
        ([(UNIT, UNIT[1:], UNIT)], r"its q has a tensor of shape \[6\] and torch.float32 behind a token with children"),
        ([(UNIT, UNIT * math.nan, UNIT)], "its q has NaN or inf behind a token with children; give 7 probabilities"),
        ([(UNIT.long(), UNIT, UNIT)], r"shape \[7\] and torch.int64 behind a token with children; give 7 prob"),
        ([(UNIT, UNIT, torch.empty(0))], None),  # leaves need none
        ([None], None),
    ],
)
def test_distributions_that_cannot_be_are_refused(extra: Seq[Any], message: str | None) -> None:
    draft, rows = Draft.from_chains([[1, 2]]), Batch((Row(Request("first", (1,), 9)),))
    draft = replace(draft, extra=tuple(q and Drawn(q) for q in extra))
    with nullcontext() if message is None else pytest.raises(DraftError, match=message):
        draft.check(rows, [2], VOCAB)
