"""Closed forms of the paper's appendix: E(τ), E(τ_max), E(δ̄) and E(r̄) (EMS-SD, Equations 6–11).

The paper finds the expected values "challenging to express" and simulates them. They are short sums, below, for any
distribution of τ that is the same for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emssd.errors import ConfigError

__all__ = ["Expected", "acceptance_pmf", "expected", "max_pmf"]

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected values of one step of a batch.

    Attributes:
        tau: E(τ), the mean acceptance length of a row, in tokens.
        tau_max: E(τ_max), the longest of the batch (Equation 8), in tokens.
        padding_length: E(δ̄), by how much the mean is shorter than the longest (Equation 9), in tokens.
        padding_ratio: E(r̄) = E(δ̄/τ_max), the mean of the steps' ratios (Equation 10); ``padding_ratio`` of a run.
        ratio_of_means: E(δ̄)/E(τ_max), the share of all aligned tokens that is padding.
    """

    tau: float
    tau_max: float
    padding_length: float
    padding_ratio: float
    ratio_of_means: float


def acceptance_pmf(p: float, max_acceptance: int) -> _Array:
    """``[max_acceptance]`` P(τ = 1), P(τ = 2), …: geometric (Equation 6), cut off at `max_acceptance`.

    Args:
        p: probability that a drafted token is right, given that those before it are.
        max_acceptance: the longest τ, one more than the tokens drafted; the paper's figure has 8.

    Raises:
        ConfigError: no probability, or no length.
    """
    if not 0 <= p <= 1 or max_acceptance < 1:
        raise ConfigError(f"p is {p} and max_acceptance is {max_acceptance}; give p in 0..1 and a length of at least 1")
    at_least = float(p) ** np.arange(max_acceptance)
    pmf: _Array = at_least - np.append(at_least[1:], 0.0)
    return pmf


def max_pmf(pmf: _Array, batch_size: int) -> _Array:
    """``[max_acceptance]`` P(τ_max = 1), … of `batch_size` independent rows (Equation 11).

    Args:
        pmf: ``[max_acceptance]`` of τ.
        batch_size: at least one.

    Raises:
        ConfigError: no rows.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
    at_most = np.cumsum(pmf) ** batch_size
    result: _Array = np.diff(at_most, prepend=0.0)
    return result


def expected(pmf: _Array, batch_size: int) -> Expected:
    """All expected values for `batch_size` rows that follow `pmf`.

    For the ratio, ``E(r̄) = 1 - Σ_m E(τ_0; τ_max = m) / m``: rows are exchangeable, so that row 0 stands for the mean,
    and ``E(τ_0; τ_max ≤ m) = Σ_{j≤m} j P(τ=j) · P(τ≤m)^(b-1)``.

    Args:
        pmf: ``[max_acceptance]`` of τ.
        batch_size: at least one.
    """
    lengths = np.arange(1, len(pmf) + 1)
    tau = float(lengths @ pmf)
    tau_max = float(lengths @ max_pmf(pmf, batch_size))
    mean_below = np.cumsum(lengths * pmf) * np.cumsum(pmf) ** (batch_size - 1)
    padding_ratio = 1.0 - float((np.diff(mean_below, prepend=0.0) / lengths).sum())
    padding = max(0.0, tau_max - tau)  # no rounding below zero where there is no padding
    return Expected(tau, tau_max, padding, max(0.0, padding_ratio), padding / tau_max)
