"""Splits the time of a step into phases: who does the work names its phase, and the decode loop starts the timer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

from emssd.metrics.stats import PHASES, StepStats

__all__ = ["StepTimer", "phase"]

_RUNNING: ContextVar[StepTimer | None] = ContextVar("emssd_step_timer", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the body, or the function that this decorates, as phase `name` of the step that is being timed.

    Within another phase it counts as that one: what a draft model computes is time of drafting.
    """
    timer = _RUNNING.get()
    if timer is None or timer.phase is not None:
        yield
        return
    timer.switch(name)
    try:
        yield
    finally:
        timer.switch(None)


class StepTimer:
    """Times one step, as a context manager; what lies in no phase is ``other``.

    Attributes:
        phase: the running one.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()
        self._token: Token[StepTimer | None] | None = None

    def __enter__(self) -> StepTimer:
        self._token = _RUNNING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _RUNNING.reset(self._token)

    def switch(self, name: str | None) -> None:
        """End the running phase and begin phase `name`."""
        now = time.perf_counter()
        self._seconds[self.phase or "other"] += now - self._since
        self.phase, self._since = name, now

    def timed(self, stats: StepStats) -> StepStats:
        """`stats` with the seconds of each phase up to now."""
        self.switch(self.phase)
        return dataclasses.replace(stats, seconds=dict(self._seconds))
