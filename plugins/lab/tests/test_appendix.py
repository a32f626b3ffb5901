"""The expected values of the paper's appendix: closed forms, an enumeration of all batches, simulated batches."""

from __future__ import annotations

import itertools
from statistics import NormalDist

import numpy as np
import pytest
from emssd_lab.experiment.appendix import Expected, acceptance_pmf, appendix_points, expected, max_pmf
from hypothesis import given
from hypothesis import strategies as st

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


@looped("p, max_acceptance, batch_size", [(1.1, 8, 1), (0.5, 0, 1), (0.5, 8, 0)])
def test_values_outside_of_their_ranges_are_refused(p: float, max_acceptance: int, batch_size: int) -> None:
    with pytest.raises(ConfigError, match=r"must|give p in"):
        appendix_points([p], [batch_size], max_acceptance=max_acceptance)
