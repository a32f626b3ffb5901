"""On tensors of floats the rules decide as on fractions, row by row as alone, and where floats are rounded."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from fractions import Fraction
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.sampling.residual import SampledTree, Verdict, verify_deterministic, verify_traversal
from emssd.sampling.residual.distributions import choose, without
from tests.sampling.cases import DRAFTS, TARGETS, rebuilt, trees_of
from tests.sampling.exact import Rule, way
from tests.support.drawing import rsd_c
from tests.support.tiers import looped

RULES: list[Rule] = [verify_traversal, verify_deterministic]
rules = pytest.mark.parametrize("rule", RULES, ids=["traversal", "deterministic"])
_GRID = 101  # no probability here is a fraction of it, so that no rounding decides


@rules
@looped("shape", [(1, 1), (2, 2), (3, 1)])
def test_floats_decide_as_fractions_do(rule: Rule, shape: tuple[int, ...]) -> None:
    random, lengths = Random(1), set[int]()
    for target, draft in product(TARGETS.values(), DRAFTS):
        for each in random.choices(list(trees_of(draft, shape)), k=20):
            tree = rebuilt(each)
            texts = [way(tree, node) for node in range(-1, len(tree.token_ids))]
            exact = [np.stack([model(text) for text in texts]) for model in (target, DRAFTS[draft])]
            tensors = [torch.from_numpy(rows.astype(np.float64)) for rows in exact]
            numbers = [Fraction(2 * random.randrange(_GRID) + 1, 2 * _GRID) for _ in range(len(texts) + 1)]
            verdict = rule(*exact, *each, iter(numbers).__next__)
            assert rule(*tensors, *each, map(float, numbers).__next__) == verdict
            lengths.add(len(verdict.path))
    assert lengths == set(range(len(shape) + 1))


def distributions(num_rows: int, vocab: int, seed: int, top: int = 0) -> torch.Tensor:
    """``[num_rows, vocab]``; with `top`, only that many tokens are possible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab, generator=generator, dtype=torch.float64).mul_(2)
    if top:
        logits[logits < logits.topk(top).values[:, -1:]] = -torch.inf
    return logits.softmax(dim=1)


def source(seed: int) -> Callable[[], float]:
    return Random(seed).random


@st.composite
def drawn(draw: st.DrawFn) -> tuple[torch.Tensor, SampledTree, int]:
    """A target's rows, a tree that was drawn from a draft like it or unlike it, and a seed."""
    seed, vocab = draw(st.integers(0, 2**20)), draw(st.sampled_from([2, 5, 60]))
    branching = draw(st.sampled_from([(1,), (1, 1, 1, 1), (2, 2), (4, 1), (3, 2, 1)]))
    near = draw(st.sampled_from([0.0, 0.3, 1.0]))
    num_rows = 1 + sum(np.cumprod(branching))
    target = distributions(int(num_rows), vocab, seed, draw(st.sampled_from([0, 2])))
    others = distributions(int(num_rows), vocab, seed + 1, draw(st.sampled_from([0, 2])))
    q = (1 - near) * target + near * others
    tree = rsd_c(lambda _, nodes: [q[node + 1] for node in nodes], branching, source(seed))
    return target[: len(tree.token_ids) + 1], tree, seed


@rules
@given(drawn())
def test_only_tokens_that_the_target_may_say_are_emitted(
    rule: Rule, case: tuple[torch.Tensor, SampledTree, int]
) -> None:
    target, tree, seed = case
    verdict = rule(target, tree.draft, tree.token_ids, tree.parents, source(seed + 7))
    at = -1
    for node in verdict.path:
        assert tree.parents[node] == at
        assert target[at + 1, tree.token_ids[node]] > 0
        at = node
    assert target[at + 1, verdict.token] > 0


def block_verification(p: torch.Tensor, q: torch.Tensor, tokens: Seq[int], uniform: Callable[[], float]) -> Verdict:
    """Algorithm 2 of Sun et al. 2024 (arXiv 2403.10444), the longest accepted block being looked for from its end."""
    weights = [1.0]
    for place, token in enumerate(tokens):
        weights.append(min(weights[-1] * float(p[place, token]) / float(q[place, token]), 1.0))
    for length in range(len(tokens), -1, -1):
        if length == len(tokens):
            accept, rest = weights[length], p[length]
        else:
            left = (weights[length] * p[length] - q[length]).clamp(min=0)
            mass = float(left.sum())
            accept, rest = mass / (mass + 1 - weights[length]) if mass else 0.0, left / mass
        if length == 0 or (accept > 0 and uniform() < accept):
            return Verdict(list(range(length)), choose(rest, uniform()))
    raise AssertionError


def test_traversal_of_a_chain_is_block_verification() -> None:
    lengths = set()
    for seed in range(300):
        p, others = distributions(5, 30, seed), distributions(4, 30, seed + 5000)
        q = 0.6 * p[:4] + 0.4 * others
        tokens = [
            choose(row, uniform) for row, uniform in zip(q, Random(seed).choices([0.1, 0.4, 0.8], k=4), strict=True)
        ]
        expected = block_verification(p, q, tokens, source(seed))
        assert verify_traversal(p, [*q, torch.empty(0)], tokens, range(-1, 3), source(seed)) == expected
        lengths.add(len(expected.path))
    assert lengths == {0, 1, 2, 3, 4}


def test_equal_distributions_accept_all_whatever_is_drawn() -> None:
    target = distributions(5, 40, 1)
    tokens = [int(row.argmax()) for row in target[:4]]
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert verify_traversal(target, target, tokens, range(-1, 3), lambda u=uniform: u).path == [0, 1, 2, 3]  # type: ignore[misc]


def test_nothing_is_accepted_that_the_target_never_says() -> None:
    target = torch.tensor([[0.0, 0.0, 0.5, 0.5]] * 3, dtype=torch.float64)
    draft = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3, dtype=torch.float64)
    assert verify_traversal(target, draft, [0, 1], [-1, -1], lambda: 0.0) == Verdict([], 2)
    assert verify_traversal(target, draft, [1, 1], [-1, 0], lambda: 0.0) == Verdict([], 2)


def test_a_token_is_where_the_number_falls() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    numbers = (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)
    assert [choose(probs, number) for number in numbers] == [1, 1, 3, 3, 4, 4]
    assert choose(probs * (1 - 1e-9), 1 - 1e-12) == 4  # the sum is below the number
    assert choose(probs * torch.nan, 0.5) == 0


def test_without_a_token_the_others_add_up_to_one() -> None:
    probs = torch.tensor([1 - 2e-18, 1e-18, 1e-18], dtype=torch.float64)
    assert without(probs, 0).tolist() == [0, 0.5, 0.5]
    assert probs[0] == 1
    assert without(torch.tensor([0.0, 1.0]), 1).tolist() == [0, 0]
