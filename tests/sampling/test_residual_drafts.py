"""Trees are drawn without replacement: their shapes, their laws, and what verification is told of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd.plugins.registry import Registry
from emssd.sampling.residual import SampledTree
from emssd.sequences import Request
from emssd.testing.conformance.policy_world import DRAFTS as POLICY_DRAFTS
from emssd.testing.conformance.policy_world import Drafts, PolicyWorld, WatchedPolicy
from emssd.testing.conformance.scripted import Decision, Life
from emssd.testing.drafters import ScriptedBudget
from tests.sampling.cases import DRAFTS, Tree, beam_of, beam_trees, trees_of
from tests.sampling.exact import Model, behind, probabilities, way
from tests.support.drawing import rsd_c, rsd_s

VOCAB = 4


def floats(model: Model) -> Callable[[SampledTree, Seq[int]], list[torch.Tensor]]:
    return lambda tree, nodes: [torch.from_numpy(q.astype(np.float64)) for q in behind(model)(tree, nodes)]


class Noise:
    """Exponentials that belong to a text, whichever tree it stands in."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.rand(vocab**3, vocab, generator=generator, dtype=torch.float64).mul(4).sub(2)
        self.table = torch.empty(vocab**3, vocab, dtype=torch.float64).exponential_(generator=generator)
        self.places, self.vocab = list[int](), vocab

    def behind(self, tree: SampledTree, nodes: Seq[int]) -> list[torch.Tensor]:
        numbers = [[token + 1 for token in way(tree, node)] for node in nodes]
        self.places = [sum(n * (self.vocab + 1) ** i for i, n in enumerate(text)) for text in numbers]
        assert max(self.places) < len(self.table)
        return list(self.logits[self.places].softmax(dim=1))

    def __call__(self, num_nodes: int) -> torch.Tensor:
        assert num_nodes == len(self.places)
        return self.table[self.places]


def as_tree(tree: SampledTree) -> Tree:
    return tuple(tree.token_ids), tuple(tree.parents)


def test_children_are_drawn_without_replacement() -> None:
    q = DRAFTS["all possible"](())
    expected = {
        ((one, two), (-1, -1)): q[one] * q[two] / (1 - q[one]) for one in range(3) for two in range(3) if one != two
    }
    assert trees_of("all possible", (2,)) == expected


def test_verification_is_told_what_children_were_drawn_from() -> None:
    noise, generator = Noise(3), torch.Generator().manual_seed(0)
    for tree in (
        rsd_c(noise.behind, (2, 2), lambda: torch.rand((), generator=generator).item()),
        rsd_s(noise.behind, 3, 3, noise),
    ):
        assert len(tree.draft) == len(tree.token_ids) + 1
        for node, q in zip(range(-1, len(tree.token_ids)), tree.draft, strict=True):
            expected = noise.behind(tree, [node])[0] if node in tree.parents else torch.empty(0)
            assert torch.equal(q, expected)


@given(st.integers(0, 2**20), st.integers(1, 8), st.integers(1, 3))
def test_a_beam_is_the_first_of_all_texts_to_arrive(seed: int, width: int, depth: int) -> None:
    noise = Noise(seed, 3)
    everything = rsd_s(noise.behind, 3**depth, depth, noise)
    ways = [way(everything, node) for node in range(len(everything.token_ids))]
    arrivals = [text for text in ways if len(text) == depth]  # levels are ordered by arrival
    assert len(arrivals) == 3**depth
    assert as_tree(rsd_s(noise.behind, width, depth, noise)) == beam_of(arrivals, width, depth)


def deviation(counts: Counter[Tree], law: dict[Tree, Fraction]) -> float:
    """The G statistic of `counts` in standard deviations above its mean, roughly."""
    total = sum(counts.values())
    assert set(counts) <= set(law)
    statistic = 2 * sum(count * math.log(count / (total * law[tree])) for tree, count in counts.items())
    return (statistic - (len(law) - 1)) / math.sqrt(2 * (len(law) - 1))


TWO_TOKENS = Model(probabilities(2, 1), {(0,): probabilities(1, 5), (1,): probabilities(7, 1)})


@pytest.mark.parametrize(
    ("width", "depth", "draft"),
    [(1, 2, DRAFTS["all possible"]), (2, 2, DRAFTS["all possible"]), (3, 2, DRAFTS["with zeros"]), (2, 3, TWO_TOKENS)],
)
def test_beams_have_the_law_of_an_exponential_race(width: int, depth: int, draft: Model) -> None:
    generator, vocab = torch.Generator().manual_seed(7), len(draft.rest)
    law = beam_trees(draft, width, depth, vocab)

    def drawn(noise: Callable[[int], torch.Tensor]) -> Counter[Tree]:
        return Counter(as_tree(rsd_s(floats(draft), width, depth, noise)) for _ in range(1500))

    def exponential(num_nodes: int) -> torch.Tensor:
        return torch.empty(num_nodes, vocab, dtype=torch.float64).exponential_(generator=generator)

    assert deviation(drawn(exponential), law) < 4
    assert deviation(drawn(lambda num_nodes: exponential(num_nodes).sqrt()), law) > 20


def test_what_cannot_follow_is_not_in_a_beam() -> None:
    draft = floats(DRAFTS["one-hot"])
    noise = torch.ones(9, 3, dtype=torch.float64)
    assert as_tree(rsd_s(draft, 5, 3, lambda num_nodes: noise[:num_nodes])) == ((1, 0, 0), (-1, 0, 1))
    nothing = torch.zeros(3, dtype=torch.float64)
    tree = rsd_s(lambda tree, nodes: [nothing] * len(nodes), 2, 3, lambda num_nodes: noise[:num_nodes])
    assert as_tree(tree) == ((), ())


TRIMS_BY_CONFIDENCE = {"adaptive"}
"""These see which token was drawn if they see its confidence; `residual` may not show it to them."""

SEEDS = range(12)


@cache
def installed() -> dict[str, Callable[[], BudgetPolicy]]:
    specs = Registry().specs("budget")
    return {spec.name: lambda spec=spec: spec.build(spec.config()) for spec in specs}  # type: ignore[misc]


def policies() -> list[str]:
    return sorted({"adaptive", "fixed", *installed()})


class Asked(BudgetPolicy):
    """Asks a policy, and a copy of it, which is shown another draft: how often do they trim to other lengths?

    Args:
        policy: to ask.
        shown: what the copy is shown in place of a draft.
    """

    def __init__(self, policy: BudgetPolicy, shown: Callable[[Draft], Draft]) -> None:
        self.policy, self.max_depth, self._shown = policy, policy.max_depth, shown
        self.num_asked = self.num_different = 0

    def allot(self, step: BudgetStep) -> Seq[int]:
        return self.policy.allot(step)

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        other = list(deepcopy(self.policy).trim(step, self._shown(draft)))
        lengths = list(self.policy.trim(step, draft))
        self.num_asked += any(draft.lengths)
        self.num_different += other != lengths
        return lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self.policy.observe(outcome, stats)


def lives(seed: int) -> Iterator[Life]:
    draw = Random(seed)
    for name in "abc":
        script = tuple(
            Decision(9, draw.randint(1, 9), draw.randint(0, 4), draw.randrange(7), draw.randrange(8)) for _ in range(5)
        )
        yield Life(Request(name, (1, 2), 60), script)


def asked(make: Callable[[], BudgetPolicy], drafts: Drafts, shown: Callable[[Draft], Draft]) -> Asked:
    """After some lives with drafts of a kind; the counts are of all of them."""
    total = Asked(make(), shown)
    for seed in SEEDS:
        one = Asked(make(), shown)
        PolicyWorld(WatchedPolicy(one), 1, drafts).live([*lives(seed)])
        total.num_asked += one.num_asked
        total.num_different += one.num_different
    assert total.num_asked > 50
    return total


def other_ids(draft: Draft) -> Draft:
    """The same, where each token is the next one of the vocabulary."""
    return replace(draft, token_ids=(draft.token_ids + 1) % 7)


def other_confidence(draft: Draft) -> Draft:
    """The same, had other tokens been drawn: their probabilities are others."""
    assert draft.confidence is not None
    return replace(other_ids(draft), confidence=tuple(1 - each for each in draft.confidence))


@pytest.mark.parametrize("drafts", POLICY_DRAFTS)
@pytest.mark.parametrize("name", policies())
def test_no_policy_trims_by_the_ids(name: str, drafts: Drafts) -> None:
    assert asked(installed()[name], drafts, other_ids).num_different == 0


@pytest.mark.parametrize("name", policies())
def test_it_is_known_which_policies_trim_by_confidence(name: str) -> None:
    differs = asked(installed()[name], "confident trees", other_confidence).num_different > 0
    assert differs == (name in TRIMS_BY_CONFIDENCE)


class ByToken(ScriptedBudget):
    """Drops all from the first token 1 on."""

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        rows = [
            draft.token_ids[start:stop].tolist() for start, stop in zip(draft.indptr, draft.indptr[1:], strict=False)
        ]
        return [row.index(1) if 1 in row else len(row) for row in rows]
