"""The current slowness of the machine, relative to what was learnt."""

from __future__ import annotations

__all__ = ["Pace"]

_GAIN = 0.15  # of a step's deviation is taken over
_MOST = 1.5  # times as quick as expected, at which a single step is counted
_RETURN = 0.002  # a step: what lasts is learnt as the curve


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
        """Learn from a step that took `seconds`, and `expected` if the factor were 1; both are above 0.

        Its deviation is weighed as `FadingRegression` weighs errors. So both agree on what is usual where steps stray,
        and neither makes the other drift.
        """
        speed = min(expected * self.factor / seconds, _MOST)
        self.factor = self.factor ** (1.0 - _RETURN) * (1.0 + _GAIN * speed * (1.0 - speed))
