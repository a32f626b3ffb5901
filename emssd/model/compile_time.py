"""`Compiling`: how much of a program is compiled, and how long the rest takes on this machine as it is now."""

from __future__ import annotations

import logging
from datetime import timedelta
from time import monotonic
from typing import Self

__all__ = ["Compiling"]

_TRACING = 0.2  # of the time; see docs/decisions/0012-compiled-code.md

logger = logging.getLogger("emssd")


class Compiling:
    """Within, something is compiled: its layers are traced one by one, and then compilers run.

    Tracing takes the same share of the time for all models, so how long it took tells how long the rest takes, also
    beside other processes. Log records hold this as their ``compiling``.
    """

    def __init__(self, what: str, num_layers: int) -> None:
        self.title, self.num_traced, self.ended = f"compiling {what}", 0, False
        self._num_layers, self._start, self._traced = num_layers, monotonic(), 0.0

    @property
    def share(self) -> float:
        """From 0 to 1, how much is done."""
        if self._traced:
            return min(_TRACING * (monotonic() - self._start) / self._traced, 0.99)
        return _TRACING * self.num_traced / self._num_layers

    @property
    def clock(self) -> str:
        """The time that it took, and the time that it still takes."""
        elapsed, share = monotonic() - self._start, self.share
        left = f", about {_clock(elapsed / share - elapsed)} left" if share and not self.ended else ""
        return _clock(elapsed) + left

    def __enter__(self) -> Self:
        self._tell(" …")
        return self

    def traced(self) -> None:
        """All layers are traced."""
        self._traced = monotonic() - self._start
        self._tell(f": {self.clock}")

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self._tell(f" took {self.clock}")

    def _tell(self, text: str) -> None:
        logger.info("%s%s", self.title, text, extra={"compiling": self})


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
