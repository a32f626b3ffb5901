"""Least squares with coefficients that are never negative, from a stream of observations whose weight fades."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from emssd.metrics import fit_non_negative

__all__ = ["FadingRegression"]

_SWEEPS = 40  # of coordinate descent, each time from the last coefficients
_EVERY_STEP, _STEPS = 12, 16  # at first each observation is learnt from at once, then so many together


class FadingRegression:
    """Learns ``seconds ≈ coefficients · features`` online, at about a microsecond for each observation.

    Args:
        num_features: length of the feature vectors; scale them to about 1.

    Attributes:
        coefficients: ``[num_features]`` seconds per unit of each feature.
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
        fit_non_negative(self._gram.tolist(), self._moment.tolist(), self.coefficients, sweeps=_SWEEPS, ridge=1e-6)
        return True

    def _learn(self) -> None:
        rows = np.array(self._waiting)
        faded = rows * self._fade ** np.arange(len(rows) - 1, -1, -1)[:, None]
        fade = self._fade ** len(rows)
        self._gram, self._moment = self._gram * fade + faded.T @ rows, self._moment * fade + faded.sum(0)
        self._waiting = []
