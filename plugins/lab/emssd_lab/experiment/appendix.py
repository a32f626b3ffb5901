"""The paper's appendix: τ_max, δ̄ and r̄ by p and batch size, from the closed forms and from simulated batches."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from emssd.errors import ConfigError

__all__ = ["appendix_points"]

_Array = npt.NDArray[np.float64]


class Expected(NamedTuple):
    """Expected values of one step of a batch.

    Attributes:
        tau_max: E(τ_max), the longest of the batch (Equation 8), in tokens.
        padding_length: E(δ̄), by how much the mean is shorter than the longest (Equation 9), in tokens.
        padding_ratio: E(r̄) = E(δ̄/τ_max), the mean of the steps' ratios (Equation 10); ``padding_ratio`` of a run.
    """

    tau_max: float
    padding_length: float
    padding_ratio: float


def acceptance_pmf(p: float, max_acceptance: int) -> _Array:
    """``[max_acceptance]`` P(τ = 1), P(τ = 2), …: geometric (Equation 6), cut off at `max_acceptance`.

    `p` is the probability that a drafted token is right, given that those before it are.
    """
    if not 0 <= p <= 1 or max_acceptance < 1:
        raise ConfigError(f"p is {p} and max_acceptance is {max_acceptance}; give p in 0..1 and a length of at least 1")
    at_least = float(p) ** np.arange(max_acceptance)
    return np.asarray(at_least - np.append(at_least[1:], 0.0))


def max_pmf(pmf: _Array, batch_size: int) -> _Array:
    """``[max_acceptance]`` P(τ_max = 1), … of `batch_size` independent rows that follow `pmf` (Equation 11)."""
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
    return np.diff(np.cumsum(pmf) ** batch_size, prepend=0.0)


def expected(pmf: _Array, batch_size: int) -> Expected:
    """All expected values for `batch_size` rows that follow `pmf`.

    For the ratio, ``E(r̄) = 1 - Σ_m E(τ_0; τ_max = m) / m``: rows are exchangeable, so that row 0 stands for the mean,
    and ``E(τ_0; τ_max ≤ m) = Σ_{j≤m} j P(τ=j) · P(τ≤m)^(b-1)``.
    """
    lengths = np.arange(1, len(pmf) + 1)
    tau_max = float(lengths @ max_pmf(pmf, batch_size))
    mean_below = np.cumsum(lengths * pmf) * np.cumsum(pmf) ** (batch_size - 1)
    padding_ratio = 1.0 - float((np.diff(mean_below, prepend=0.0) / lengths).sum())
    # no rounding below zero where there is no padding
    return Expected(tau_max, max(0.0, tau_max - float(lengths @ pmf)), max(0.0, padding_ratio))


def appendix_points(
    chances: Iterable[float], batch_sizes: Seq[int], *, max_acceptance: int = 8, num_steps: int = 2000, seed: int = 0
) -> list[dict[str, Any]]:
    """All pairs of p and batch size, each with a seed of its own, counted up from `seed`.

    A point has ``p``, ``batch_size``, the expected values (``exact``), and for each of these the ``mean`` over
    simulated steps and its standard ``error``, which is the steps' sample standard deviation ÷ √steps. In a simulated
    step, a coin for each drafted token of each row says whether it is right; a row's τ ends at its first wrong token.

    Args:
        max_acceptance: the longest τ, one more than the tokens drafted; the paper's figure has 8.
        num_steps: simulated steps, at least 2.
    """
    points = []
    for number, (batch_size, p) in enumerate(product(batch_sizes, list(chances))):
        exact = expected(acceptance_pmf(p, max_acceptance), batch_size)._asdict()
        coins = np.random.default_rng(seed + number).random((num_steps, batch_size, max_acceptance - 1)) < p
        taus = 1.0 + np.logical_and.accumulate(coins, axis=2).sum(axis=2)
        longest = taus.max(axis=1)
        padding = longest - taus.mean(axis=1)
        simulated = {
            name: {"mean": float(values.mean()), "error": float(values.std(ddof=1)) / num_steps**0.5}
            for name, values in zip(Expected._fields, (longest, padding, padding / longest), strict=True)
        }
        points.append({"p": p, "batch_size": batch_size, "exact": exact, "simulated": simulated})
    return points
