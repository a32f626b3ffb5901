"""Chances of drafted nodes are the shares that are accepted, row by row, whatever a drafter says of them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from emssd_adaptive.drafter import DrafterRecord
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft, Outcome, StageStats
from emssd.sequences import Batch
from tests.support.tiers import looped


def chain(length: int, confidence: Seq[float] | None = None) -> Draft:
    return Draft.from_chains([[1] * length], None if confidence is None else [confidence])


def worths(record: DrafterRecord, name: str, draft: Draft) -> list[float]:
    record.enter((name,), [9])
    record.see(draft, (name,))
    return record.worths[0]


def observe(record: DrafterRecord, name: str, draft: Draft, path: Seq[int], limit: int = 4) -> None:
    worths(record, name, draft)
    stats = StageStats((limit,), tuple(draft.lengths), 0.0)
    record.observe(Outcome(Batch(()), draft, (path,), ()), stats, 1.0)


def learnt(num_steps: int = 60, **accepted: int) -> DrafterRecord:
    """From chains of 4, of which so many were accepted in each row."""
    record = DrafterRecord()
    for _ in range(num_steps):
        for name, number in accepted.items():
            observe(record, name, chain(4), range(number))
    return record


def test_each_row_is_learnt_and_new_ones_start_at_the_average() -> None:
    record = learnt(good=4, bad=0)
    good, bad, new = (worths(record, name, chain(4)) for name in ("good", "bad", "new"))
    assert good[0] > 0.6 > 0.55 > new[0] > 0.4 > 0.3 > bad[0]
    assert good[3] > 0.5
    record.counts.clear()
    assert worths(record, "good", chain(4)) == worths(record, "bad", chain(4)) == new


def test_a_row_that_changes_is_followed() -> None:
    record = learnt(a=4)
    for _ in range(50):
        observe(record, "a", chain(4), ())
    first, second = worths(record, "a", chain(2))
    assert first < 0.3
    first, second = worths(record, "new", chain(2))
    assert second > 0.7 * first, "nothing came after the first token"
    for _ in range(50):
        observe(record, "a", chain(4), range(4))
    assert worths(record, "a", chain(1))[0] > 0.75


@pytest.mark.parametrize(("told", "right"), [(0.16, 4), (0.99, 0)])
def test_a_confidence_that_was_never_told_is_off_by_as_much_as_the_next_surer_one(told: float, right: int) -> None:
    record = DrafterRecord()
    for _ in range(20):
        observe(record, "a", chain(4, [told] * 4), range(right))
    record.counts.clear()
    less = told / 3
    assert (worths(record, "new", chain(1, [less]))[0] > 2 * less) == (right > 0)
    assert (worths(record, "new", chain(1, [less]))[0] < less / 2) == (right == 0)


def test_what_was_not_asked_for_teaches_nothing_of_the_cost_of_drafting() -> None:
    record = learnt(num_steps=3, a=4)
    record.enter(["a", "b"], [9, 9])  # without a draft to see
    nothing = Draft.empty(2)
    record.observe(Outcome(Batch(()), nothing, ((), ()), ()), StageStats((0, 0), (0, 0), 0.0), 1.0)
    assert record.cost.num_seen == 3


def test_no_draft_beside_a_prompt_teaches_nothing() -> None:
    record, stats = learnt(a=4), StageStats((4,), (0,), 0.0)
    before = record.firsts[0]
    for is_prefill in (True, False):
        worths(record, "a", Draft.empty(1))
        record.observe(Outcome(Batch(()), Draft.empty(1), ((),), ()), stats, 1.0, is_prefill=is_prefill)
        record.enter(["a"], [9])
        assert (record.firsts[0] < 0.95 * before) == (not is_prefill)


def test_a_row_that_drafts_nothing_is_forgotten_in_time() -> None:
    record = learnt(num_steps=20, bad=0, good=4)
    assert worths(record, "bad", chain(1))[0] < 0.7 * worths(record, "new", chain(1))[0]
    for _ in range(200):
        observe(record, "bad", Draft.empty(1), (), limit=0)
    assert worths(record, "bad", chain(1)) == pytest.approx(worths(record, "new", chain(1)), rel=0.05)


@pytest.mark.parametrize("is_found", [True, False])
def test_what_a_try_finds_outweighs_what_is_old(is_found: bool) -> None:
    record = learnt(num_steps=200, a=0)
    worths(record, "b", chain(2))
    record.is_try, before = True, record.firsts[0]
    path = range(2) if is_found else ()
    record.observe(Outcome(Batch(()), chain(2), (path,), ()), StageStats((2,), (2,), 0.0), 1.0)
    worths(record, "new", chain(1))
    assert record.firsts[0] > 0.25 if is_found else record.firsts[0] <= before


def test_nodes_that_were_not_verified_are_worth_nothing_behind_a_wrong_one() -> None:
    record = DrafterRecord()
    for _ in range(30):
        worths(record, "a", chain(4))
        record.observe(Outcome(Batch(()), chain(4), ((),), ()), StageStats((4,), (1,), 0.0), 1.0)
    record.enter(["new"], [9])
    assert record.laters[0] < 0.85


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Draft, list[int]]:
    """A tree with or without confidences, all siblings and one long chain included; and a path down it."""
    tree, path = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 12)))], list[int]()
    while children := [node for node, parent in enumerate(tree) if parent == (path[-1] if path else -1)]:
        if (taken := draw(st.sampled_from([*children, -1]))) < 0:
            break
        path.append(taken)
    confidence = draw(st.none() | st.lists(st.floats(0, 1), min_size=len(tree), max_size=len(tree)).map(tuple))
    return Draft(torch.ones(len(tree), dtype=torch.int64), (0, len(tree)), tuple(tree), confidence), path


@given(st.lists(st.tuples(st.sampled_from("ab"), drafts()), max_size=30), drafts())
def test_worths_are_probabilities_of_paths(
    history: list[tuple[str, tuple[Draft, list[int]]]], drawn: tuple[Draft, list[int]]
) -> None:
    """One child of a node is right, or none."""
    record = DrafterRecord()
    for name, (seen, path) in history:
        observe(record, name, seen, path, limit=12)
    draft, _ = drawn
    tree = draft.tree(0)
    for name in ("a", "new"):
        values = worths(record, name, draft)
        assert len(values) == len(tree)
        for node in (-1, *range(len(tree))):
            children = [values[child] for child, parent in enumerate(tree) if parent == node]
            assert all(worth >= 0 for worth in children)
            assert sum(children) <= (1 if node < 0 else values[node]) + 1e-12


@looped("truth", [lambda confidence: confidence, lambda confidence: 1 - confidence, lambda confidence: 0.3])
def test_confidence_becomes_the_share_that_is_accepted_whatever_it_means(truth: Callable[[float], float]) -> None:
    confidences, record, random = [0.01, 0.25, 0.55, 0.85, 0.99], DrafterRecord(), np.random.default_rng(0)
    assert worths(record, "new", chain(2, [1.0, 0.5])) == pytest.approx([0.985, 0.985 * 0.55])
    for number in range(1500):
        confidence = float(random.choice(confidences))
        observe(record, str(number), chain(1, [confidence]), range(int(random.random() < truth(confidence))))
    chances = [worths(record, "new", chain(1, [confidence]))[0] for confidence in confidences]
    assert chances == pytest.approx([truth(confidence) for confidence in confidences], abs=0.15)


def test_siblings_are_learnt_given_that_no_earlier_one_was_right() -> None:
    tree, record = Draft(torch.ones(3, dtype=torch.int64), (0, 3), (-1, -1, -1)), DrafterRecord()
    for number in range(800):
        observe(record, str(number), tree, ([0], [1], [2], [])[number % 4])
    assert worths(record, "new", tree) == pytest.approx([0.25] * 3, abs=0.04)


def test_drafts_that_are_not_yet_made_are_worth_what_they_were_worth_until_now() -> None:
    record = DrafterRecord()
    for _ in range(200):
        observe(record, "good", chain(3, [0.85] * 3), [0, 1, 2])
        observe(record, "nothing is found", Draft.empty(1), ())
    record.enter(["good", "nothing is found", "new"], [9] * 3)
    good, none, new = record.firsts
    assert none < 0.25 < 0.4 < new < 0.6 < 0.7 < good
    assert min(record.laters) > 0.6
    for number in range(200):
        observe(record, "new", chain(3, [0.85] * 3) if number % 2 else Draft.empty(1), [0, 1, 2] if number % 2 else ())
    assert record.spread > 0.5, "each is right, or there is none"


def test_where_first_tokens_are_wrong_later_ones_are_not_trusted() -> None:
    record = DrafterRecord()
    for _ in range(20):
        observe(record, "a", chain(4, [0.5] * 4), [])
    record.enter(["new"], [10])
    assert record.laters[0] < 0.2
