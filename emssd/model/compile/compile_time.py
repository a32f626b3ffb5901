"""`Compiling`: how much of a program is compiled, and how long the rest takes."""

from __future__ import annotations

import logging
from datetime import timedelta
from time import monotonic, process_time
from typing import Self

__all__ = ["Compiling", "expected_seconds"]

# Seconds of a processor that compilers take, at least and for each of tracing; see docs/decisions/0012-compiled-code.md
_FIXED, _PER_TRACED = 13.0, 5.7
_TRACING = 0.3  # seconds for each layer, as long as none is traced

logger = logging.getLogger("emssd")


def expected_seconds(num_layers: int) -> float:
    """About how long compiling a model takes."""
    return _seconds(_TRACING * num_layers)


def _seconds(tracing: float, waiting: float = 1.0) -> float:
    """Seconds on the clock for the whole; a second of a processor takes `waiting` seconds."""
    return tracing * (1 + _PER_TRACED) + _FIXED * waiting


class Compiling:
    """Within, something is compiled: its layers are traced one by one, and then compilers run.

    Their time is estimated from that of tracing, on the processor and on the clock. Log records hold this as their
    ``compiling``.
    """

    def __init__(self, what: str, num_layers: int) -> None:
        self.title, self.num_traced, self.ended = f"compiling {what}", 0, False
        self._num_layers, self._start, self._seconds = num_layers, (monotonic(), process_time()), 0.0

    @property
    def share(self) -> float:
        """The part that is done, from 0 to 1."""
        return min((monotonic() - self._start[0]) / self._total(), 0.99) if self.num_traced else 0.0

    def _total(self) -> float:
        if self._seconds:
            return self._seconds
        elapsed, busy = monotonic() - self._start[0], process_time() - self._start[1]
        return _seconds(elapsed * self._num_layers / self.num_traced, elapsed / max(busy, 1e-3))

    @property
    def clock(self) -> str:
        """The time since the start, and the time left."""
        elapsed, share = monotonic() - self._start[0], self.share
        left = f", about {_clock(elapsed / share - elapsed)} left" if share and not self.ended else ""
        return _clock(elapsed) + left

    def __enter__(self) -> Self:
        self._tell(" …")
        return self

    def traced(self) -> None:
        self.num_traced = self._num_layers
        self._seconds = self._total()
        self._tell(f": {self.clock}")

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self._tell(f" took {self.clock}")

    def _tell(self, text: str) -> None:
        logger.info("%s%s", self.title, text, extra={"compiling": self})


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
