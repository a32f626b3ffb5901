"""A machine that becomes slower and quicker as a whole: what pays does not change, and neither may the choice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from emssd_adaptive.policy import AdaptiveBudget
from emssd_adaptive.step_time import Pace

from tests.support.budget_world import World
from tests.support.tiers import looped

NUM_ROWS, LIMIT = 8, 4


def kneed(num_tokens: int) -> float:
    """Milliseconds of a step on two cores: further tokens are nearly free up to the 8th."""
    return 10.0 + 0.2 * min(num_tokens, 8) + 0.8 * max(0, num_tokens - 8)


def relative_rate(chance: float, wander: float, seed: int, num_rows: int = NUM_ROWS) -> float:
    """Tokens a second under the policy ÷ those without drafts, as if the machine had never wandered.

    Args:
        chance: of each drafted token, given those before it.
        wander: how far the logarithm of the machine's slowness strays, over some hundred steps; beside it, each step is
            up to 30 % longer by chance.
        seed: of all that is random.
    """
    random, pace, steady = np.random.default_rng(seed), 0.0, 0.0
    world = World(AdaptiveBudget(), num_rows, kneed, lambda row, n: min(n, int(random.geometric(1 - chance)) - 1))

    def seconds(num_tokens: int) -> float:
        nonlocal pace, steady
        pace = 0.99 * pace + wander * math.sqrt(0.02) * random.normal()
        steady += kneed(num_tokens)
        return kneed(num_tokens) * math.exp(pace + min(0.1 * abs(random.normal()), 0.3))

    world.seconds = seconds
    world.warm()
    before, steady = sum(len(row.tokens) for row in world.rows), 0.0
    world.run(1200, LIMIT)
    num_tokens = sum(len(row.tokens) for row in world.rows) - before
    return num_tokens / steady / (num_rows / kneed(num_rows))


@looped("wander", [0.0, 0.15])
@looped("seed", range(3))
def test_drafts_that_cost_more_than_they_bring_stay_undone_on_a_machine_that_wanders(wander: float, seed: int) -> None:
    assert relative_rate(0.5, wander, seed) > 0.98


@pytest.mark.parametrize("wander", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_pay_are_drawn_on_a_machine_that_wanders(wander: float, seed: int) -> None:
    chance, num_rows = 0.6, 4
    best = max(
        sum(chance**i for i in range(length + 1)) * kneed(num_rows) / kneed(num_rows * (length + 1))
        for length in range(LIMIT + 1)
    )
    assert best > 1.4
    assert relative_rate(chance, wander, seed, num_rows) > 0.9 * best


def test_a_pace_is_followed_and_one_long_step_is_not() -> None:
    pace = Pace()
    for _ in range(60):
        pace.observe(1.0, 1.5)
    assert pace.factor == pytest.approx(1.5, rel=0.01)
    pace.observe(1.0, 1e6)
    assert pace.factor < 1.65


@pytest.mark.parametrize("seed", range(3))
def test_on_a_machine_of_a_steady_pace_it_does_not_wander_off(seed: int) -> None:
    """Steps that are longer by chance are what is usual there; in 20,000 of them nothing may add up."""
    random, policy = np.random.default_rng(seed), AdaptiveBudget()
    world = World(policy, 4, lambda n: kneed(n) * math.exp(min(0.4 * abs(random.normal()), 1.5)), lambda row, n: 0)
    world.warm()
    factors = []
    for _ in range(20):
        world.run(1000, 0)
        factors.append(policy._pace.factor)
    assert min(factors) > 0.5
    assert max(factors) < 2.0
