"""The time of a step on this machine without its drafting, t(tokens, context), and how slow the machine is now."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import inf

from emssd_adaptive.regression import FadingRegression

__all__ = ["Pace", "StepTime"]

# Where the cost of one more token may change: flat while weights are what takes time, steep once arithmetic is.
_KNOTS = (0, 8, 16, 32, 64, 256)
_TOKENS, _CONTEXT = 32.0, 4096.0  # units of the features

_GAIN = 0.15  # of a step's deviation is taken over
_MOST = 1.5  # times as quick as expected, at which a single step is counted
_RETURN = 0.002  # a step: what lasts is learnt as the curve


class StepTime:
    """A convex curve of the number of tokens plus a part in proportion to the KV that is read, both learnt online."""

    def __init__(self) -> None:
        self._verify = FadingRegression(2 + len(_KNOTS))
        self._rises = [0.0] * len(_KNOTS)  # seconds of one more token after each knot

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
        if not self._verify.observe([1.0, *hinges, num_kv_tokens / _CONTEXT], seconds):
            return
        total, self._rises = self._verify.coefficients[0], []
        for knot, after, rise in zip(
            _KNOTS, (*_KNOTS[1:], inf), accumulate(self._verify.coefficients[1:-1]), strict=True
        ):
            # No token takes longer than the mean of those before it, whatever a slow step made of sizes that are rare.
            self._rises.append(min(rise / _TOKENS, total / max(knot, 1)))
            total += self._rises[-1] * (after - knot)

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Expected seconds of a step of `num_tokens` tokens."""
        start, context = self._verify.coefficients[0], self._verify.coefficients[-1]
        seconds, before = start + context * num_kv_tokens / _CONTEXT, 0.0
        for knot, rise in zip(_KNOTS, self._rises, strict=True):
            if num_tokens <= knot:
                break
            seconds, before = seconds + (rise - before) * (num_tokens - knot), rise
        return seconds

    def rises(self, num_tokens: int, count: int) -> list[float]:
        """``[count]`` the expected seconds that each of `count` tokens adds to a step of `num_tokens`, 0 or more."""
        found, stop = list[float](), num_tokens + count
        for (start, end), rise in zip(pairwise((*_KNOTS, inf)), self._rises, strict=True):
            found += [rise] * int(min(end, stop) - max(start, num_tokens))  # none where that is negative
        return found


class Pace:
    """A factor of all seconds, which follows the steps of late.

    Machines become slower and quicker as a whole: others work on them, and clocks change. Were that learnt as a change
    of the curve of step times, it would be put down to the sizes of the steps that happen to be taken, and what is not
    done would look cheap or dear for as long as it is not done. So costs are learnt in seconds divided by this factor.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        """Learn from a step that took `seconds`, and `expected` if the factor were 1; both are above 0.

        Its deviation is weighed as `FadingRegression` weighs errors. So both agree on what is usual where steps stray,
        and neither makes the other drift.
        """
        speed = min(expected * self.factor / seconds, _MOST)
        self.factor = self.factor ** (1.0 - _RETURN) * (1.0 + _GAIN * speed * (1.0 - speed))
