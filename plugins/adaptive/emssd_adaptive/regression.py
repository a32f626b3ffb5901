"""Least squares with coefficients that are never negative, from a stream of observations whose weight fades."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

__all__ = ["FadingRegression"]

_SWEEPS = 40  # of coordinate descent; the problems have half a dozen unknowns


class FadingRegression:
    """Learns ``seconds ≈ coefficients · features`` online.

    Args:
        num_features: length of the feature vectors; scale them to about 1.
        half_life: observations until the weight of an earlier one is halved.
    """

    def __init__(self, num_features: int, half_life: float = 200.0) -> None:
        self._fade = 0.5 ** (1.0 / half_life)
        self._gram = np.zeros((num_features, num_features))
        self._moment = np.zeros(num_features)
        self._coefficients = np.zeros(num_features)
        self._seen = self._fitted = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self._seen > 0

    @property
    def num_seen(self) -> int:
        """Observations so far."""
        return self._seen

    @property
    def coefficients(self) -> npt.NDArray[np.float64]:
        """``[num_features]`` seconds per unit of each feature."""
        if self._fitted != self._seen and (self._seen < 12 or self._seen - self._fitted >= 16):
            self._fit()
        return self._coefficients

    def observe(self, features: Seq[float], seconds: float) -> None:
        """Learn from one observation.

        It counts by its relative error, so that long steps do not drown short ones, and a step that a busy machine
        held up, hardly at all.
        """
        row = np.asarray(features) / max(seconds, 1e-9)
        self._gram = self._gram * self._fade + np.outer(row, row)
        self._moment = self._moment * self._fade + row
        self._seen += 1

    def _fit(self) -> None:
        """Coordinate descent on the normal equations, a little ridge added, each coefficient kept at 0 or above."""
        gram = self._gram + np.diag(1e-6 * self._gram.diagonal() + 1e-12)
        solution = self._coefficients.copy()
        for _ in range(_SWEEPS):
            for i in range(len(solution)):
                rest = self._moment[i] - gram[i] @ solution + gram[i, i] * solution[i]
                solution[i] = max(0.0, rest / gram[i, i])
        self._coefficients, self._fitted = solution, self._seen
