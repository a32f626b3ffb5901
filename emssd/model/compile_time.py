"""`Compiling`: how far a program is while it is compiled, and how long the rest takes on this machine as it is now."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

__all__ = ["Compiling", "compiling"]

_TRACING = 0.2  # of the time that compiling takes, from models of 18 to 30 layers, see docs/decisions/0012

logger = logging.getLogger("emssd")


class Compiling:
    """One program that is being compiled: first the layers are traced, one by one, and then the compilers run.

    Tracing takes the same share of the time for all models. So the time it took tells that of the rest, also where
    other processes slow both down.

    Attributes:
        num_traced: layers that are traced by now.
        ended: whether it is over.
    """

    def __init__(self, title: str, num_layers: int) -> None:
        self.title, self.num_traced, self.ended = title, 0, False
        self._num_layers, self._start, self._traced = num_layers, monotonic(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return monotonic() - self._start

    @property
    def share(self) -> float:
        """From 0 to 1, how much is done."""
        if self.ended:
            return 1.0
        if not self._traced:
            return _TRACING * min(self.num_traced / self._num_layers, 1.0)
        return min(_TRACING * self.elapsed / self._traced, 0.99)

    @property
    def left(self) -> float | None:
        """Seconds that it still takes; ``None`` before the first layer."""
        return self.elapsed / self.share * (1 - self.share) if self.share else None

    def traced(self) -> None:
        """All layers are traced."""
        self._traced = self.elapsed
        self.tell("%s takes about %s more …", self.title, _clock(self.left or 0.0))

    def tell(self, text: str, *values: object) -> None:
        """Log a line. Handlers find this in it, as the attribute ``compiling``."""
        logger.info(text, *values, extra={"compiling": self})


@contextmanager
def compiling(what: str, num_layers: int) -> Iterator[Compiling]:
    """Within, `what` is compiled; its begin and end are told."""
    work = Compiling(f"compiling {what}", num_layers)
    work.tell("%s, once for all later runs …", work.title)
    try:
        yield work
    finally:
        elapsed, work.ended = work.elapsed, True
        work.tell("%s took %s", work.title, _clock(elapsed))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
