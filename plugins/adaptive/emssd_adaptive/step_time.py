"""How long a step takes on this machine without its drafting: t(tokens, context)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emssd_adaptive.regression import FadingRegression

__all__ = ["StepTime"]

_Array = npt.NDArray[np.float64]

# Where the cost of one more token may change: flat while weights are what takes time, steep once arithmetic is.
_KNOTS = (0, 16, 64, 256)
_TOKENS, _CONTEXT = 32.0, 4096.0  # units of the features


class StepTime:
    """A convex curve of the number of tokens plus a part in proportion to the KV that is read, both learnt online."""

    def __init__(self) -> None:
        self._verify = FadingRegression(2 + len(_KNOTS))

    @property
    def is_known(self) -> bool:
        """Whether a step was observed."""
        return self._verify.is_known

    @property
    def num_observed(self) -> int:
        """Steps observed."""
        return self._verify.num_seen

    def observe(self, num_tokens: int, num_kv_tokens: int, seconds: float) -> None:
        """Learn from a step that computed `num_tokens` over `num_kv_tokens` of KV; `seconds` without drafting."""
        hinges = [max(0, num_tokens - knot) / _TOKENS for knot in _KNOTS]
        self._verify.observe([1.0, *hinges, num_kv_tokens / _CONTEXT], seconds)

    def verify_seconds(self, num_tokens: _Array, num_kv_tokens: int) -> _Array:
        """Expected seconds of steps of `num_tokens` ``[m]`` tokens."""
        coefficients = self._verify.coefficients
        seconds = np.full(len(num_tokens), coefficients[0] + coefficients[-1] * num_kv_tokens / _CONTEXT)
        for knot, coefficient in zip(_KNOTS, coefficients[1:-1], strict=True):
            if coefficient:
                seconds += coefficient / _TOKENS * np.maximum(0.0, num_tokens - knot)
        return seconds
