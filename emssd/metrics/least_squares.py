"""Least squares with coefficients that are never negative."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import mul

__all__ = ["fit_non_negative"]


def fit_non_negative(
    gram: Seq[Seq[float]], moment: Seq[float], solution: list[float], *, sweeps: int, ridge: float = 0.0
) -> None:
    """Improve `solution` by coordinate descent on the normal equations; a feature that was never seen keeps its value.

    Plain Python, which is faster than NumPy for half a dozen unknowns.

    Args:
        gram: ``[n, n]`` products of the features.
        moment: ``[n]`` products of the features and what is fitted.
        solution: ``[n]`` where to begin; 0 or more.
        sweeps: at most so many.
        ridge: added to the diagonal, as a share of it.
    """
    seen = [(i, line, line[i], line[i] * (1.0 + ridge)) for i, line in enumerate(gram) if line[i] > 0.0]
    for _ in range(sweeps):
        before = solution[:]
        for i, line, square, ridged in seen:
            rest = moment[i] - sum(map(mul, line, solution)) + square * solution[i]
            solution[i] = rest / ridged if rest > 0.0 else 0.0
        if solution == before:
            break
