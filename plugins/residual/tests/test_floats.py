"""On tensors of floats the rules decide as on fractions, row by row as alone, and where floats are rounded."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from emssd_residual.distributions import choose, without
from emssd_residual.rules import verify_deterministic, verify_traversal

from tests.support.exact import Rule, way
from tests.support.residual_cases import DRAFTS, TARGETS, rebuilt, trees_of
from tests.support.tiers import looped

RULES: list[Rule] = [verify_traversal, verify_deterministic]
rules = pytest.mark.parametrize("rule", RULES, ids=["traversal", "deterministic"])
_GRID = 101  # no probability here is a fraction of it, so that no rounding decides


@rules
@looped("shape", [(1, 1), (2, 2), (3, 1)])
def test_floats_decide_as_fractions_do(rule: Rule, shape: tuple[int, ...]) -> None:
    random, lengths = Random(1), set[int]()
    for target, draft in product(TARGETS.values(), DRAFTS):
        for drawn in random.choices(list(trees_of(draft, shape)), k=20):
            tree = rebuilt(drawn)
            texts = [way(tree, node) for node in range(-1, len(tree.token_ids))]
            exact = [np.stack([model(text) for text in texts]) for model in (target, DRAFTS[draft])]
            tensors = [torch.from_numpy(rows.astype(np.float64)) for rows in exact]
            numbers = [Fraction(2 * random.randrange(_GRID) + 1, 2 * _GRID) for _ in range(len(texts) + 1)]
            verdict = rule(*exact, *drawn, iter(numbers).__next__)
            assert rule(*tensors, *drawn, map(float, numbers).__next__) == verdict
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


def test_equal_distributions_accept_all_whatever_is_drawn() -> None:
    target = distributions(5, 40, 1)
    tokens = [int(row.argmax()) for row in target[:4]]
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert verify_traversal(target, target, tokens, range(-1, 3), lambda u=uniform: u).path == [0, 1, 2, 3]  # type: ignore[misc]


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
