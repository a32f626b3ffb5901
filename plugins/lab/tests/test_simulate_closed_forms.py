"""Expected values of the simulator: of chains in closed form, of trees by law."""

from __future__ import annotations

import itertools
from statistics import NormalDist

import numpy as np
import pytest
from emssd_lab.simulate import PRESETS, Simulator, TreeLaw, geometric_trace
from emssd_lab.simulate.appendix import Expected, acceptance_pmf, appendix_points, expected, max_pmf
from emssd_lab.simulate.trace_drafter import TraceDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError
from tests.support.tiers import looped

# Rounding of sums of at most 5^4 products, each of a few factors, in float64.
ROUNDING = 1e-12


@given(st.floats(0, 1), st.integers(1, 4), st.integers(1, 5))
def test_closed_forms_equal_enumeration(p: float, batch_size: int, max_acceptance: int) -> None:
    pmf = acceptance_pmf(p, max_acceptance)
    values = np.zeros(3)
    for taus in itertools.product(range(1, max_acceptance + 1), repeat=batch_size):
        longest, mean = max(taus), sum(taus) / batch_size
        weight = np.prod([pmf[tau - 1] for tau in taus])
        values += weight * np.array([longest, longest - mean, (longest - mean) / longest])
    np.testing.assert_allclose(expected(pmf, batch_size), values, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.7])
def test_without_a_cap_they_are_the_papers_equations(p: float) -> None:
    pmf = acceptance_pmf(p, 200)  # 0.7^200 is below the rounding
    k = np.arange(1, 51)
    np.testing.assert_allclose(pmf[:50], p ** (k - 1) * (1 - p), atol=ROUNDING)  # Equation 6
    assert expected(pmf, 1).tau_max == pytest.approx(1 / (1 - p))  # Equation 7
    for b in (1, 3, 24):
        printed = np.where(k > 1, (1 - p**k) ** b - (1 - p ** (k - 1)) ** b, (1 - p) ** b)  # Equation 11
        np.testing.assert_allclose(max_pmf(pmf, b)[:50], printed, atol=ROUNDING)


POINTS = [(p, batch_size) for p in (0.3, 0.6, 0.8) for batch_size in (2, 8)]
# A z-score beyond which one of all comparisons falls with a probability of 1e-6 if all is right (Bonferroni).
Z_BOUND = NormalDist().inv_cdf(1 - 1e-6 / (2 * len(POINTS) * len(Expected._fields)))


@looped(("p", "batch_size"), POINTS)
def test_simulated_batches_agree_with_closed_forms(p: float, batch_size: int) -> None:
    (point,) = appendix_points([p], [batch_size], num_steps=600, seed=7)
    for name, estimate in point["simulated"].items():
        assert abs(estimate["mean"] - point["exact"][name]) / estimate["error"] < Z_BOUND


@given(st.floats(0, 1), st.integers(0, 5), st.integers(1, 40), st.integers(0, 9))
def test_made_up_text_is_one_coin_per_token(p: float, depth: int, length: int, seed: int) -> None:
    """The right part of a draft at a position follows from the coins of the positions after it."""
    (row,) = geometric_trace(p, 1, num_speculative_tokens=depth, max_new_tokens=length, seed=seed).requests
    (stage,) = row.stages
    coins = [right > 0 for right in stage.right] if depth else [False] * length
    runs = [next((i for i in range(length - at) if not coins[at + i]), length - at) for at in range(length)]
    assert list(stage.right) == [min(run, depth) for run in runs]
    assert stage.drafted == (depth,) * length


@looped(
    "call",
    [
        lambda: acceptance_pmf(1.1, 8),
        lambda: acceptance_pmf(0.5, 0),
        lambda: max_pmf(acceptance_pmf(0.5, 8), 0),
        lambda: geometric_trace(-0.1, 1, num_speculative_tokens=1),
        lambda: geometric_trace(1.0, 1, num_speculative_tokens=1, concentration=1.0),
        lambda: geometric_trace(0.5, 0, num_speculative_tokens=1),
        lambda: geometric_trace(0.5, 1, num_speculative_tokens=-1),
    ],
)
def test_values_outside_of_their_ranges_are_refused(call: object) -> None:
    with pytest.raises(ConfigError, match=r"must|give p in"):
        call()  # type: ignore[operator]


TRACE = geometric_trace(0.5, 24, num_speculative_tokens=4, num_prompt=8, max_new_tokens=64)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 12), st.integers(0, 9))
def test_what_is_accepted_is_what_the_law_says(branches: list[int], num_tokens: int, seed: int) -> None:
    law = TreeLaw(branches, [[0.5, 0.3, 0.1]], seed)
    scheduler, budget = ContinuousScheduler(8), FixedBudget(num_tokens)
    simulation = Simulator(
        TRACE, scheduler, budget, PRESETS["8b-1xh100"], drafters=[TraceDrafter(TRACE, law=law)]
    ).run()
    for row in simulation.sequences:
        position = steps = 0
        while position < 64:
            right, node = law.right(row.request_id, position)[:num_tokens], -1
            depth = 0
            while children := [n for n, ok in enumerate(right) if ok and law.parents[n] == node]:
                (node,), depth = children, depth + 1
            position, steps = position + min(depth, 64 - position - 1) + 1, steps + 1
        assert row.num_steps == steps
    assert simulation.report.num_new_tokens == 24 * 64
