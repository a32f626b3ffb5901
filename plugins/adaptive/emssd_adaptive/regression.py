"""Least squares with coefficients that are never negative, from a stream of observations whose weight fades."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import mul

__all__ = ["FadingRegression"]

_SWEEPS = 40  # of coordinate descent; the problems have half a dozen unknowns
_EVERY_STEP, _STEPS = 12, 16  # at first each observation is learnt from at once, then so many together


class FadingRegression:
    """Learns ``seconds ≈ coefficients · features`` online. So few numbers are faster in plain Python than in arrays.

    Args:
        num_features: length of the feature vectors; scale them to about 1.
        half_life: observations until the weight of an earlier one is halved.

    Attributes:
        coefficients: ``[num_features]`` seconds per unit of each feature.
        num_seen: observations so far.
    """

    def __init__(self, num_features: int, half_life: float = 200.0) -> None:
        self._fade = 0.5 ** (1.0 / half_life)
        self._gram = [[0.0] * num_features for _ in range(num_features)]
        self._moment = [0.0] * num_features
        self.coefficients = [0.0] * num_features
        self.num_seen = self._num_fitted = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self.num_seen > 0

    def observe(self, features: Seq[float], seconds: float) -> None:
        """Learn from one observation.

        It counts by its relative error, so that long steps do not drown short ones, and a step that a busy machine
        held up, hardly at all.
        """
        weight, fade = 1.0 / max(seconds, 1e-9), self._fade
        row = [feature * weight for feature in features]
        self._gram = [
            [value * fade + left * right for value, right in zip(line, row, strict=True)]
            for line, left in zip(self._gram, row, strict=True)
        ]
        self._moment = [value * fade + left for value, left in zip(self._moment, row, strict=True)]
        self.num_seen += 1
        if self.num_seen < _EVERY_STEP or self.num_seen - self._num_fitted >= _STEPS:
            self._fit()

    def _fit(self) -> None:
        """Coordinate descent on the normal equations, a little ridge added, each coefficient kept at 0 or above."""
        diagonal = [line[i] for i, line in enumerate(self._gram)]
        ridged = [value + 1e-6 * value + 1e-12 for value in diagonal]
        solution = self.coefficients
        for _ in range(_SWEEPS):
            before = solution[:]
            for i, line in enumerate(self._gram):
                rest = self._moment[i] - sum(map(mul, line, solution)) + diagonal[i] * solution[i]
                solution[i] = max(0.0, rest / ridged[i])
            if solution == before:
                break
        self._num_fitted = self.num_seen
