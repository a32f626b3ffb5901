"""Least squares with coefficients that are never negative, from a stream of observations whose weight fades."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import mul

import numpy as np

__all__ = ["FadingRegression"]

_SWEEPS = 40  # of coordinate descent; the problems have half a dozen unknowns
_EVERY_STEP, _STEPS = 12, 16  # at first each observation is learnt from at once, then so many together


class FadingRegression:
    """Learns ``seconds ≈ coefficients · features`` online, at about a microsecond for each observation.

    Args:
        num_features: length of the feature vectors; scale them to about 1.
        half_life: observations until the weight of an earlier one is halved.

    Attributes:
        coefficients: ``[num_features]`` seconds per unit of each feature.
        num_seen: observations so far.
    """

    def __init__(self, num_features: int, half_life: float = 200.0) -> None:
        self._fade = 0.5 ** (1.0 / half_life)
        # Of each observation that was learnt from, divided by its seconds: the products of its features, and their sum.
        self._gram, self._moment = np.zeros((num_features, num_features)), np.zeros(num_features)
        self._waiting: list[list[float]] = []
        self.coefficients = [0.0] * num_features
        self.num_seen = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self.num_seen > 0

    def observe(self, features: Seq[float], seconds: float) -> bool:
        """Learn from one observation. Returns whether `coefficients` are new.

        It counts by its relative error, so that long steps do not drown short ones, and a step that a busy machine
        held up, hardly at all.
        """
        weight = 1.0 / max(seconds, 1e-9)
        self._waiting.append([feature * weight for feature in features])
        self.num_seen += 1
        if self.num_seen >= _EVERY_STEP and len(self._waiting) < _STEPS:
            return False
        self._learn()
        self._fit()
        return True

    def _learn(self) -> None:
        rows = np.array(self._waiting)
        faded = rows * self._fade ** np.arange(len(rows) - 1, -1, -1)[:, None]
        fade = self._fade ** len(rows)
        self._gram, self._moment = self._gram * fade + faded.T @ rows, self._moment * fade + faded.sum(0)
        self._waiting = []

    def _fit(self) -> None:
        """Coordinate descent on the normal equations, a little ridge added, each coefficient kept at 0 or above."""
        gram, moment = self._gram.tolist(), self._moment.tolist()  # so few numbers are faster in plain Python
        solution = self.coefficients
        seen = [(i, line, line[i], line[i] * (1.0 + 1e-6)) for i, line in enumerate(gram) if line[i] > 0.0]
        for _ in range(_SWEEPS):
            before = solution[:]
            for i, line, own, ridged in seen:
                rest = moment[i] - sum(map(mul, line, solution)) + own * solution[i]
                solution[i] = rest / ridged if rest > 0.0 else 0.0
            if solution == before:
                break
