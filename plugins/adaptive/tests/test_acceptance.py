"""Chances of drafted nodes are the shares that are accepted, row by row, whatever a drafter says of them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from emssd_adaptive.acceptance import FIRST, LATER, Acceptance
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft
from tests.support.tiers import looped


def chain(length: int, confidence: Seq[float] | None = None) -> Draft:
    return Draft.from_chains([[1] * length], None if confidence is None else [confidence])


def gains(acceptance: Acceptance, name: str, draft: Draft) -> list[float]:
    return acceptance.worths(draft, 0, acceptance.row(name))


def observe(acceptance: Acceptance, name: str, draft: Draft, num_accepted: int) -> None:
    acceptance.observe(draft, 0, range(num_accepted), acceptance.row(name))
    acceptance.end_step(with_drafts=True)
    acceptance.row(name).step += 1


def test_each_row_is_learnt_and_new_ones_start_at_the_average() -> None:
    acceptance = Acceptance(16)
    for _ in range(60):
        observe(acceptance, "good", chain(4), 4)
        observe(acceptance, "bad", chain(4), 0)
    good, bad, new = (gains(acceptance, name, chain(4)) for name in ("good", "bad", "new"))
    assert good[0] > 0.65 > 0.6 > new[0] > 0.4 > 0.35 > bad[0]
    assert good[3] > 0.5
    acceptance.release(["good", "bad", "never seen"])
    assert gains(acceptance, "good", chain(4)) == gains(acceptance, "bad", chain(4)) == new


def test_a_row_that_changes_is_followed() -> None:
    acceptance = Acceptance(8)
    for accepted in [4] * 50 + [0] * 50:
        observe(acceptance, "a", chain(4), accepted)
    assert gains(acceptance, "a", chain(1))[0] < 0.25
    assert acceptance.chance(LATER, acceptance.row("a")) > 0.7, "nothing came after the first token"
    for _ in range(50):
        observe(acceptance, "a", chain(4), 4)
    assert gains(acceptance, "a", chain(1))[0] > 0.75


def test_a_row_that_drafts_nothing_is_forgotten_in_time() -> None:
    acceptance = Acceptance(16)
    for _ in range(20):
        observe(acceptance, "bad", chain(4), 0)
        observe(acceptance, "good", chain(4), 4)
    before = gains(acceptance, "bad", chain(1))[0]
    for _ in range(200):
        acceptance.end_step(with_drafts=False)
    assert gains(acceptance, "bad", chain(1))[0] == pytest.approx(gains(acceptance, "new", chain(1))[0], rel=0.05)
    assert before < 0.7 * gains(acceptance, "new", chain(1))[0]


def test_what_a_try_finds_outweighs_what_is_old() -> None:
    acceptance = Acceptance(16)
    for _ in range(200):
        observe(acceptance, "a", chain(1), 0)
    acceptance.look_anew()
    for _ in range(8):
        observe(acceptance, "b", chain(1), 1)
    assert acceptance.chance(FIRST, acceptance.row("new")) > 0.4


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
    acceptance = Acceptance(16)
    for name, (seen, path) in history:
        acceptance.observe(seen, 0, path, acceptance.row(name))
        acceptance.end_step(with_drafts=True)
    draft, _ = drawn
    tree = draft.tree(0)
    for name in ("a", "new"):
        worths = gains(acceptance, name, draft)
        assert len(worths) == len(tree)
        for node in (-1, *range(len(tree))):
            children = [worths[child] for child, parent in enumerate(tree) if parent == node]
            assert all(worth >= 0 for worth in children)
            assert sum(children) <= (1 if node < 0 else worths[node]) + 1e-12


def calibrated(truth: Callable[[float], float], confidences: Seq[float]) -> Acceptance:
    acceptance, random = Acceptance(16), np.random.default_rng(0)
    for number in range(1500):
        confidence = float(random.choice(list(confidences)))
        observe(acceptance, str(number), chain(1, [confidence]), int(random.random() < truth(confidence)))
    return acceptance


@looped("truth", [lambda confidence: confidence, lambda confidence: 1 - confidence, lambda confidence: 0.3])
def test_confidence_becomes_the_share_that_is_accepted_whatever_it_means(truth: Callable[[float], float]) -> None:
    confidences = [0.01, 0.25, 0.55, 0.85, 0.99]
    acceptance = calibrated(truth, confidences)
    chances = [gains(acceptance, "new", chain(1, [confidence]))[0] for confidence in confidences]
    assert chances == pytest.approx([truth(confidence) for confidence in confidences], abs=0.15)
    assert gains(Acceptance(16), "new", chain(2, [1.0, 0.5])) == pytest.approx([0.985, 0.985 * 0.55])


def test_siblings_are_learnt_given_that_no_earlier_one_was_right() -> None:
    tree = Draft(torch.ones(3, dtype=torch.int64), (0, 3), (-1, -1, -1))
    acceptance = Acceptance(16)
    for number in range(800):
        path = ([0], [1], [2], [])[number % 4]
        acceptance.observe(tree, 0, path, acceptance.row(str(number)))
        acceptance.end_step(with_drafts=True)
    assert gains(acceptance, "new", tree) == pytest.approx([0.25] * 3, abs=0.04)


def test_drafts_that_are_not_yet_made_are_worth_what_they_were_worth_until_now() -> None:
    acceptance = Acceptance(16)
    for _ in range(100):
        acceptance.expect([0.8, 0.4, 0.2], 3, acceptance.row("good"))
        acceptance.expect([], 3, acceptance.row("nothing is found"))
    good, none, new = (acceptance.row(name) for name in ("good", "nothing is found", "new"))
    assert acceptance.chance(FIRST, none) < 0.1 < 0.38 < acceptance.chance(FIRST, new) < 0.42
    assert acceptance.chance(FIRST, good) > 0.7
    assert acceptance.chance(LATER, good) == pytest.approx(0.5, abs=0.03)
