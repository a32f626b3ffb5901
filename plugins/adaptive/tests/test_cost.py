"""Lines of cost find what steps take, on machines that are busy now and then, too."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from emssd_adaptive.cost import CostLine, StepCost
from emssd_adaptive.drafter import DrafterRecord
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("seed", range(6))
def test_no_other_coefficients_that_are_not_negative_fit_better(seed: int) -> None:
    line, random = CostLine([0] * 4), np.random.default_rng(seed)
    line._next_fit = 10**9  # until all is known: a fit goes on from the one before
    features = np.c_[np.ones(40), random.uniform(0, 1, (40, 3))] / random.uniform(0.5, 2, (40, 1))
    for row in features:
        line.observe([*row], 1.0)
    line._fit()
    weights = np.sqrt(0.5 ** (np.arange(40, 0, -1) / 200))
    some = [weights[:, None] * features * used for used in product([0.0, 1.0], repeat=4)]
    fits = [np.linalg.lstsq(rows, weights, rcond=None)[0] for rows in some]
    errors = [np.square(weights * (features @ fit - 1)).sum() for fit in (line.coefficients, *fits) if min(fit) >= 0]
    assert min(line.coefficients) >= 0
    assert errors[0] < (1 + 1e-6) * min(errors[1:])


@pytest.mark.parametrize("seed", range(8))
def test_no_noise_makes_tokens_free(seed: int) -> None:
    """Sizes that were rarely seen, KV that grows step by step, and a pace that nobody knows: a fit has much choice."""
    cost, random = StepCost(), np.random.default_rng(seed)
    for step in range(100):
        drafted = {1: 8, 3: 8}.get(step, 0)
        seconds = (2.4 + 0.3 * (4 + drafted)) * float(np.exp(0.05 * abs(random.normal())))
        cost.observe(4 + drafted, 240 + 4 * step, drafted * 60, seconds)
        if step > 3:
            assert cost.plain(4, 240 + 4 * step) == pytest.approx(3.6, rel=0.2)
            assert sum(cost.rises(4, 8)) + 8 * 60 * cost.line.coefficients[3] > 1.2, "2.4 in truth"


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9000), st.floats(1e-4, 1)), min_size=1, max_size=60))
def test_a_step_is_convex_in_its_tokens_beside_two_jumps_and_never_falls(stream: list[tuple[int, int, float]]) -> None:
    cost = StepCost()
    for num_tokens, num_kv, seconds in stream:
        cost.observe(num_tokens, num_kv, num_kv // 2, seconds)
    rises = cost.rises(0, 499)
    assert all(cost.rises(start, 200) == rises[start : start + 200] for start in (1, 16, 60, 299))
    assert min(rises) >= 0
    slopes = [rise for num_before, rise in enumerate(rises) if num_before not in {16, 32}]
    assert slopes == sorted(slopes)
    plain = [cost.plain(num_rows, 1000) for num_rows in range(500)]
    assert np.diff(plain) == pytest.approx(rises, rel=1e-6, abs=1e-8)
    assert all(cost.plain(num_rows, 2000) >= before for num_rows, before in enumerate(plain))


def test_what_one_draft_took_is_put_down_to_its_levels_so_that_shorter_ones_are_tried() -> None:
    cost = DrafterRecord().cost
    cost.observe([1, 4, 4, 40], 2.0)
    assert cost.coefficients == pytest.approx([0.0, 0.5, 0.0, 0.0], abs=1e-3)


def test_drafts_that_take_long_take_no_longer_for_tokens_to_catch_up_with_until_that_is_seen() -> None:
    cost = DrafterRecord().cost
    for levels in (1, 2, 3, 4):
        cost.observe([1, levels, levels, 1], 2.0)
    assert cost.coefficients[0] == pytest.approx(2.0, rel=0.05)
    assert cost.coefficients[3] < 0.05


def test_a_step_cost_learns_tokens_kv_and_what_a_drafted_token_reads() -> None:
    def truth(tokens: int, kv: int, pairs: int) -> float:
        return 0.01 + 0.00015 * max(0, tokens - 64) + 1e-6 * kv + 3e-7 * pairs

    cost, random = StepCost(), np.random.default_rng(0)
    for _ in range(400):
        tokens, kv, drafted = int(random.integers(1, 200)), int(random.integers(100, 8000)), int(random.integers(0, 5))
        cost.observe(tokens, kv, drafted * kv, truth(tokens, kv, drafted * kv))
    for tokens, kv in product([1, 30, 64, 100, 190], [200, 4000, 7900]):
        assert cost.plain(tokens, kv) == pytest.approx(truth(tokens, kv, 0), rel=0.1)
    assert cost.line.coefficients[3] == pytest.approx(3e-7, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_in_a_short_run_steps_are_not_put_down_to_their_kv(seed: int) -> None:
    """It hardly changes, and so explains what the first steps took as well as a constant does."""
    cost, random = StepCost(), np.random.default_rng(seed)
    for step, tokens in enumerate([8, 12, 19, 29, 8, 33, 36, *[32] * 13]):
        cost.cold = 0.7**step
        seconds = (1.8 + 0.05 * tokens + 1.3 * 0.6**step) * float(np.exp(0.05 * random.normal()))
        cost.observe(tokens, 1024 + 20 * step, 0, seconds)
    assert cost.plain(8, 8 * 1024) < 1.5 * cost.plain(8, 1024)


def test_a_step_may_jump_behind_16_or_32_tokens() -> None:
    cost = StepCost()
    for tokens in [8, 16, 17, 24, 32, 33, 40] * 20:
        cost.observe(tokens, 100, 0, 3.0 + 0.06 * tokens + 0.4 * (tokens > 16) + 0.8 * (tokens > 32))
    assert cost.rises(8, 32) == pytest.approx([*[0.06] * 8, 0.46, *[0.06] * 15, 0.86, *[0.06] * 7], abs=0.02)
    assert cost.rises(16, 2) == cost.rises(15, 3)[1:]


def test_tokens_are_not_free_where_a_step_takes_nothing_else() -> None:
    cost = StepCost()
    for tokens in [1, 4, 8, 16] * 20:
        cost.observe(tokens, 100, 0, 0.01 * tokens)
    assert cost.plain(4, 100) == pytest.approx(0.04, rel=0.05)
    assert cost.rises(4, 2) == pytest.approx([0.01, 0.01], rel=0.05)


def test_one_slow_step_of_a_rare_size_does_not_make_such_sizes_dear() -> None:
    cost = StepCost()
    for tokens in [*[1, 4, 8, 16] * 20, 17, *[1, 4, 8, 16] * 20]:
        cost.observe(tokens, 100, 0, 0.09 if tokens == 17 else 0.03)
    assert cost.plain(20, 100) < 1.25 * 0.04, "a jump by a quarter, and four more tokens at the mean of those before"
    assert cost.rises(16, 4)[1] < 1.25 * 1.1 * 0.03 / 16


def test_a_machine_that_becomes_slower_has_another_pace_and_the_same_costs() -> None:
    cost = StepCost()
    for step in range(240):
        cost.observe(1 + step % 4, 100, 0, (1.0 if step < 80 else 1.5) * (10 + step % 4))
    assert cost.pace == pytest.approx(1.5, rel=0.05)
    assert np.diff([cost.plain(num_rows, 100) for num_rows in (1, 4)]) == pytest.approx(3, rel=0.15)
    cost.observe(1, 100, 0, 1e6)
    assert cost.pace < 1.65, "one long step"


def test_on_a_machine_of_a_steady_pace_it_does_not_wander_off() -> None:
    """Steps that are longer by chance are what is usual there; in 10,000 of them nothing may add up."""
    cost, random, paces = StepCost(), np.random.default_rng(0), []
    for deviation in np.minimum(0.4 * np.abs(random.normal(size=10_000)), 1.5):
        cost.observe(4, 400, 0, 0.01 * float(np.exp(deviation)))
        paces.append(cost.pace)
    assert 0.5 < min(paces[::500]) <= max(paces[::500]) < 2.0
