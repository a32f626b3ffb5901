"""Token trees: what nodes are worth, which nodes of all rows are taken, and what a policy makes of them in time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, product
from typing import Self

import numpy as np
import pytest
import torch
from emssd_adaptive.acceptance import Acceptance
from emssd_adaptive.chances import Calibration, Siblings, levels
from emssd_adaptive.choice import best_lengths
from emssd_adaptive.policy import AdaptiveBudget
from emssd_adaptive.profile import Profile
from hypothesis import given
from hypothesis import strategies as st

from emssd.decoding.warmup import HeldBudget
from emssd.drafting import Draft
from tests.support.budget_world import Curve, World
from tests.support.tiers import looped

# In tenths: equal worths are the rule, not the exception.
WORTHS = st.lists(st.lists(st.integers(0, 10).map(lambda tenths: tenths / 10), max_size=4), min_size=1, max_size=3)
RISES = st.lists(st.floats(0, 1), min_size=13, max_size=13).map(sorted)
SECONDS = st.floats(0.1, 5)


def rate(worths: Seq[Seq[float]], lengths: Seq[int], gain: float, seconds: float, rises: Seq[float]) -> float:
    total = gain + sum(sum(row[:length]) for row, length in zip(worths, lengths, strict=True))
    return total / (seconds + sum(rises[: sum(lengths)]))


def best_of_all(worths: Seq[Seq[float]], gain: float, seconds: float, rises: Seq[float]) -> float:
    every = product(*(range(len(row) + 1) for row in worths))
    return max(rate(worths, lengths, gain, seconds, rises) for lengths in every)


@given(WORTHS, RISES, SECONDS, st.sampled_from(["falling worths", "equal rises", "any"]))
def test_no_other_prefixes_are_better_where_worths_fall_or_rises_are_equal_and_their_rate_is_true(
    worths: list[list[float]], rises: list[float], seconds: float, kind: str
) -> None:
    if kind == "falling worths":
        worths = [sorted(row, reverse=True) for row in worths]
    elif kind == "equal rises":
        rises = rises[:1] * 13
    lengths, found = best_lengths(worths, len(worths), seconds, rises)
    assert all(0 <= length <= len(row) for length, row in zip(lengths, worths, strict=True))
    assert found == pytest.approx(rate(worths, lengths, len(worths), seconds, rises))
    least = len(worths) / seconds if kind == "any" else best_of_all(worths, len(worths), seconds, rises)
    assert found >= least * (1 - 1e-9)


@st.composite
def trees(draw: st.DrawFn, max_size: int = 12) -> list[int]:
    """Any tree, all siblings and one long chain included."""
    size = draw(st.integers(0, max_size))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


@st.composite
def verified(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A tree and a way down it, as far as chance goes."""
    tree, way = draw(trees()), list[int]()
    while children := [node for node, parent in enumerate(tree) if parent == (way[-1] if way else -1)]:
        if (taken := draw(st.sampled_from([*children, -1]))) < 0:
            break
        way.append(taken)
    return tree, way


def check_worths(tree: Seq[int], worths: Seq[float]) -> None:
    """They are probabilities of ways through a tree: what is right is one child of a node, or none."""
    assert len(worths) == len(tree)
    for node in (-1, *range(len(tree))):
        children = [worths[child] for child, parent in enumerate(tree) if parent == node]
        assert all(worth >= 0 for worth in children)
        assert sum(children) <= (1 if node < 0 else worths[node]) + 1e-12


@given(st.lists(st.tuples(st.sampled_from("abc"), verified()), max_size=30), trees())
def test_worths_by_rank_are_probabilities(
    history: list[tuple[str, tuple[list[int], list[int]]]], tree: list[int]
) -> None:
    acceptance = Acceptance(16)
    for name, (seen, accepted) in history:
        acceptance.observe_tree(name, levels(seen, accepted))
    for worths in acceptance.tree_gains(["a", "b", "new"], [tree] * 3):
        check_worths(tree, worths)


@given(st.lists(st.tuples(verified(), st.lists(st.floats(0, 1), min_size=12, max_size=12)), max_size=30), st.data())
def test_worths_by_confidence_are_probabilities(
    history: list[tuple[tuple[list[int], list[int]], list[float]]], data: st.DataObject
) -> None:
    calibration = Calibration()
    for (seen, accepted), confidences in history:
        calibration.observe(levels(seen, accepted), confidences)
        calibration.fade()
    tree = data.draw(trees())
    check_worths(tree, *calibration.worths([tree], [[data.draw(st.floats(0, 1)) for _ in tree]]))


HISTORY = st.lists(st.integers(0, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=40)


@given(HISTORY)
def test_a_tree_that_is_a_chain_teaches_what_a_chain_does_and_is_worth_the_same(history: list[tuple[int, int]]) -> None:
    chains, as_trees = Acceptance(16), Acceptance(16)
    for drafted, accepted in history:
        chains.observe("a", drafted, accepted)
        as_trees.observe_tree("a", levels(range(-1, drafted - 1), range(accepted)))
    expected = chains.gains(["a", "new"], [5, 5])
    assert as_trees.gains(["a", "new"], [5, 5]) == expected
    for row, worths in zip(expected, as_trees.tree_gains(["a", "new"], [range(-1, 4)] * 2), strict=True):
        assert worths == pytest.approx(row)


def test_ranks_are_learnt_given_that_no_earlier_sibling_was_right() -> None:
    siblings = Siblings()
    for right in [0, 1, 2, None] * 500:
        siblings.observe(False, 3, right)
        siblings.observe(True, 3, 0)
    worths = siblings.worths([-1, -1, -1, 0, 0], first=0.25, later=0.5)
    assert worths[:3] == pytest.approx([0.25] * 3, abs=0.03)
    assert worths[3] == 0.125
    assert 0 < worths[4] <= 0.125 * 0.25, "a rank that was never tried has the first guess"


def test_ranks_that_are_not_tried_for_long_get_another_chance() -> None:
    siblings = Siblings()
    for _ in range(100):
        siblings.observe(False, 2, None)
    before = siblings.worths([-1, -1], 0.5, 0.5)[1]
    for _ in range(1000):
        siblings.fade()
    after = siblings.worths([-1, -1], 0.5, 0.5)[1]
    assert before < 0.02 < 0.12 < after


def calibrated(truth: Callable[[float], float], confidences: Seq[float]) -> Calibration:
    calibration, random = Calibration(), np.random.default_rng(0)
    for _ in range(3000):
        confidence = float(random.choice(list(confidences)))
        calibration.observe([([0], 0 if random.random() < truth(confidence) else -1)], [confidence])
    return calibration


def chances(calibration: Calibration, confidences: Seq[float]) -> list[float]:
    return [calibration.worths([[-1]], [[confidence]])[0][0] for confidence in confidences]


@looped(
    "truth",
    [lambda told: told, lambda told: 1 - told, lambda told: 0.3, lambda told: told / 3],
)
def test_confidence_becomes_the_share_that_is_accepted_whatever_it_means(truth: Callable[[float], float]) -> None:
    told = [0.01, 0.25, 0.55, 0.85, 0.99]
    assert chances(calibrated(truth, told), told) == pytest.approx([truth(each) for each in told], abs=0.07)


def test_a_confidence_that_nothing_is_known_of_lies_between_what_it_says_and_the_average() -> None:
    assert chances(Calibration(), [0.0, 1.0]) == [0.25, 0.75]
    low, high = chances(calibrated(lambda told: 0.9, [0.99]), [0.0, 0.3])
    assert 0.4 < low < high < 0.7


def test_a_profile_tells_places_and_rows_apart_and_goes_on_beyond_what_was_drafted() -> None:
    profile = Profile()
    assert not profile.is_known
    for _ in range(16):
        profile.observe(["good", "bad", "none"], [[0.8, 0.6, 0.4], [0.2, 0.15, 0.1], []])
    good, bad, new = profile.worths(["good", "bad", "new"], [4, 2, 5])
    assert new == pytest.approx([0.5, 0.375, 0.25, 0.225, 0.2025])
    assert good[:3] == pytest.approx([0.8, 0.6, 0.4], rel=0.15)
    assert bad == pytest.approx([0.2, 0.15], rel=0.35)
    profile.release(["good", "unknown"])
    assert profile.worths(["good"], [5]) == [new]
    profile.observe(["good"], [[0.1]], is_probe=True)
    assert profile.worths(["new"], [1])[0][0] == pytest.approx(0.3), "a probe counts for half"


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.floats(0, 1), max_size=6)), min_size=1, max_size=20),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_expected_worths_are_probabilities_that_never_rise(
    history: list[tuple[str, list[float]]], limits: list[int]
) -> None:
    profile = Profile()
    for name, worths in [("a", [0.5]), *history]:
        profile.observe([name], [worths])
    found = profile.worths(["a", "b", "new"], limits)
    assert [len(row) for row in found] == limits
    for row in found:
        assert row == sorted(row, reverse=True)
        assert all(0 <= worth <= 1 for worth in row)


SHAPE = (-1, 0, 1, -1, 2, 0, 3, 1, -1, 5)  # the first three are a chain
CHAIN_FIRST = (-1, 0, 1, 2, -1, -1, -1, 0, 0, 0)


class TreeWorld(World):
    """A world whose drafter draws trees of one shape.

    Args:
        policy: the policy.
        shape: parents of the nodes.
        seconds: of a step without drafting, by its number of tokens.
        chances: by rank, how likely a child is what the target says; what is left is none of them.
        confidence: what the drafter says of a node of that rank; ``None``: nothing.
        per_token: seconds that drafting a node takes.
    """

    def __init__(
        self,
        policy: AdaptiveBudget,
        shape: Seq[int],
        seconds: Curve,
        chances: Seq[float],
        confidence: Callable[[int], float] | None = None,
        per_token: float = 0.0,
    ) -> None:
        super().__init__(policy, 4, seconds, lambda row, drafted: pytest.fail("chances decide"), per_token)
        self.shape, self.chances = tuple(shape), chances
        self.confidence, self._random = confidence, np.random.default_rng(0)
        self.ranks = [self.shape[:node].count(parent) for node, parent in enumerate(shape)]

    def warm(self) -> Self:
        policy = self.policy
        for held in (0, 2, len(self.shape)):
            self.policy = HeldBudget(policy, held)
            self.run(8)
        self.policy = policy
        return self

    def gain(self, num_steps: int) -> float:
        """Tokens per second of so many steps, ÷ those without drafting."""
        self.tokens = self.time = 0.0
        self.run(num_steps)
        return self.tokens / self.time / (len(self.rows) / self.seconds(len(self.rows)))

    def run(self, num_steps: int, limit: int | None = None) -> list[list[int]]:
        return super().run(num_steps, len(self.shape) if limit is None else limit)

    def draft(self, budget: Seq[int]) -> Draft:
        parents = tuple(parent for asked in budget for parent in self.shape[:asked])
        told = (
            tuple(self.confidence(rank) for asked in budget for rank in self.ranks[:asked]) if self.confidence else None
        )
        return Draft(torch.ones(sum(budget), dtype=torch.int64), (0, *accumulate(budget)), parents, told)

    def accepted(self, draft: Draft) -> Seq[Seq[int]]:
        return [self._way(draft.tree(row)) for row in range(draft.num_rows)]

    def _way(self, tree: Seq[int]) -> list[int]:
        """Down the tree as chance goes; what the target says does not depend on what is verified."""
        way: list[int] = []
        while True:
            rank = int(np.searchsorted(np.cumsum(self.chances), self._random.random(), side="right"))
            children = [node for node, parent in enumerate(tree) if parent == (way[-1] if way else -1)]
            if rank >= min(len(children), len(self.chances)):
                return way
            way.append(children[rank])


def steep(num_tokens: int) -> float:
    return 0.01 * num_tokens


def flat(num_tokens: int) -> float:
    return 0.05


def gentle(num_tokens: int) -> float:
    return 0.05 + 0.001 * num_tokens


TOLD = [None, lambda rank: 0.9 if rank == 0 else 0.3, lambda rank: 0.0, lambda rank: 1.0, lambda rank: rank / 9]
"""No confidence, a plausible one, and such as mean nothing."""


def test_siblings_that_were_never_tried_take_nothing_from_the_first_child() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.fade()
        calibration.observe([([0], 0)] * 9 + [([0], -1)], [0.9])
    alone, *_ = calibration.worths([[-1], [-1] * 4], [[0.9], [0.9] * 4])[0]
    first, *others = calibration.worths([[-1] * 4], [[0.9] * 4])[0]
    assert first == alone == pytest.approx(0.9, abs=0.02)
    assert sum(others) == pytest.approx(1 - first)


@looped("told", TOLD)
def test_with_probes_hopeless_trees_cost_next_to_nothing(told: Callable[[int], float] | None) -> None:
    world = TreeWorld(AdaptiveBudget(), SHAPE, steep, (0.02,), told).warm()
    world.run(150)
    assert world.gain(300) > 0.98


@looped("told", TOLD)
def test_good_trees_are_faster_than_their_chain_and_than_nothing(told: Callable[[int], float] | None) -> None:
    def gain(shape: Seq[int]) -> float:
        world = TreeWorld(AdaptiveBudget(), shape, gentle, (0.5, 0.4), told).warm()
        world.run(60)
        return world.gain(200)

    chain, tree = gain((-1, 0, 1, 2)), gain(SHAPE)
    assert tree > 1.05 * chain > 1.05 * 1.4


@pytest.mark.parametrize("told", TOLD[:2])
def test_of_a_tree_whose_siblings_are_never_right_the_chain_is_taken(told: Callable[[int], float] | None) -> None:
    world = TreeWorld(AdaptiveBudget(), CHAIN_FIRST, lambda n: 0.05 + 0.004 * n, (0.95, 0.0, 0.0, 0.0), told).warm()
    world.run(200)
    kept = [length for lengths in world.run(60) for length in lengths if any(lengths)]
    assert len(kept) >= 4 * 56
    assert sum(length == 4 for length in kept) > 0.9 * len(kept)


@looped("told", TOLD)
def test_trees_that_become_good_are_found_out(told: Callable[[int], float] | None) -> None:
    world = TreeWorld(AdaptiveBudget(probe_interval=4), SHAPE, lambda n: 0.05 + 0.005 * n, (), told).warm()
    assert sum(map(sum, world.run(150)[-50:])) < 50
    world.chances = (0.9, 0.08)
    kept = [lengths for lengths in world.run(500)[-50:] if any(lengths)]
    assert len(kept) >= 47
    assert sum(map(sum, kept)) >= 11.5 * len(kept), "three nodes of each row are best"


@given(st.data())
def test_any_trees_and_confidences_keep_every_choice_within_its_limit(data: st.DataObject) -> None:
    told = data.draw(st.none() | st.lists(st.floats(0, 1), min_size=13, max_size=13))
    world = TreeWorld(
        AdaptiveBudget(probe_interval=data.draw(st.integers(1, 3))),
        [-1, *data.draw(trees())],
        data.draw(st.sampled_from([flat, steep, gentle])),
        data.draw(st.sampled_from([(), (0.5, 0.5), (0.1, 0.2, 0.3)])),
        None if told is None else told.__getitem__,
        per_token=0.001,
    )
    world.run(25)
