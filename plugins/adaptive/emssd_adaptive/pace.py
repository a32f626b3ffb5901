"""How slow the machine is at the moment, beside what was learnt of it."""

from __future__ import annotations

from math import exp, log

__all__ = ["Pace"]

_GAIN = 0.1  # of a step's deviation is taken over
_MOST = 2.0  # times as slow or as quick as expected, at which a single step is counted


class Pace:
    """A factor of all seconds, which follows the steps of late.

    Machines become slower and quicker as a whole: others work on them, and clocks change. Were that learnt as a change
    of the curve of step times, it would be put down to the sizes of the steps that happen to be taken, and what is not
    done would look cheap or dear for as long as it is not done. So costs are learnt in seconds divided by this factor.

    Attributes:
        factor: 1 as long as nothing is known.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        """Learn from a step that took `seconds`, and `expected` if the factor were 1; both are above 0."""
        deviation = log(min(max(seconds / (expected * self.factor), 1 / _MOST), _MOST))
        self.factor *= exp(_GAIN * deviation)
