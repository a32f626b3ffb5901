"""Makes a history that goes wrong smaller, as long as it still does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace

from emssd.sampling import SamplingParams

from .histories import History
from .oracle import Ask
from .runner import safely
from .worlds import World

__all__ = ["differing_fields", "shrunk"]


def shrunk(world: World, history: History, wrong: str, seconds: float = 15.0) -> tuple[History, str]:
    """The smallest history found that goes wrong in `world`, and what goes wrong; of `history` itself that is known."""
    end, found = time.monotonic() + seconds, True
    while found:
        found = False
        for smaller in _smaller(history):
            if time.monotonic() > end:
                return history, wrong
            if differences := safely(world, smaller).differences:
                history, wrong, found = smaller, differences[0], True
                break
    return history, wrong


def _smaller(history: History) -> Iterator[History]:
    """Histories with one thing less."""
    asks = history.asks
    for at in range(len(asks) if len(asks) > 1 else 0):
        yield replace(history, asks=asks[:at] + asks[at + 1 :])
    plain = History(asks)
    engine = ("policy", "room", "headroom", "close_after", "drive")
    for name in (*engine, "num_drafters", "form", "manner", "sure", "shapes"):
        if getattr(history, name) != getattr(plain, name):
            yield replace(history, **{name: getattr(plain, name)})
    for at, ask in enumerate(asks):
        less = [replace(ask, **change) for change in _less_of(ask)]
        for smaller in less:
            yield replace(history, asks=(*asks[:at], smaller, *asks[at + 1 :]))
    if history.depth > 1:
        yield replace(history, depth=history.depth // 2)
    for shape in history.shapes if len(history.shapes) > 1 else ():
        yield replace(history, shapes=(shape,))
    for mood in history.moods if len(history.moods) > 1 else ():
        yield replace(history, moods=(mood,))


def _less_of(ask: Ask) -> Iterator[dict[str, object]]:
    if ask.eos:
        yield {"eos": ()}
    if ask.stop:
        yield {"stop": ()}
    if ask.arrives:
        yield {"arrives": 0}
    if ask.sampling is not None:
        yield {"sampling": None}
        plain = SamplingParams()
        for name, value in ((each.name, getattr(plain, each.name)) for each in fields(plain)):
            if name != "temperature" and getattr(ask.sampling, name) != value:
                yield {"sampling": replace(ask.sampling, **{name: value})}
    if ask.limit > 1:
        yield {"limit": ask.limit // 2}
        yield {"limit": ask.limit - 1}


def differing_fields(history: History) -> str:
    """What of a history is not as it is by default."""
    plain = History(history.asks)
    given = [field.name for field in fields(History) if getattr(history, field.name) != getattr(plain, field.name)]
    return ", ".join([f"asks={history.asks}", *(f"{name}={getattr(history, name)!r}" for name in given)])
