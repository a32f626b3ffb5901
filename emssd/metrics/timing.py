"""Splits the time of a step into phases."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from emssd.metrics.stats import PHASES, StepStats

__all__ = ["StepTimer"]


class StepTimer:
    """Times one step; `Engine.step` ends each phase with a `lap`.

    Args:
        clock: seconds since any fixed moment; ``perf_counter`` by default.

    Attributes:
        seconds: of each of `PHASES`, up to the latest lap.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._clock = clock or time.perf_counter
        self._since = self._clock()

    def lap(self, phase: str, **parts: float) -> None:
        """Count the time since the lap before as `phase`, except for `parts`: seconds of it that are other phases."""
        now = self._clock()
        self.seconds[phase] += now - self._since
        self._since = now
        for name, seconds in parts.items():
            self.seconds[name] += seconds
            self.seconds[phase] -= seconds

    def timed(self, stats: StepStats) -> StepStats:
        """`stats` with the seconds of each phase up to now; those since the latest lap are ``other``."""
        self.lap("other")
        return dataclasses.replace(stats, seconds=dict(self.seconds))
