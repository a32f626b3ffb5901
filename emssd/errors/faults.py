"""The border at which plugins are called: an error of theirs becomes a sentence that names them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from emssd.errors import DraftError, EmssdError, PluginError

__all__ = ["blame", "described", "guarded", "named_if_slow"]

_SLOW_SECONDS = 5.0
_LONGEST = 600  # characters of a stranger's message


def described(error: BaseException) -> str:
    """An error as one printable line with the class of the exception; a `PluginError` needs none."""
    try:
        text = str(error)
    except BaseException as other:  # a stranger's exception may be as broken as what raised it
        text = f"no message, as that raises {type(other).__name__}"
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
    if isinstance(error, PluginError):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def blame(owner: str, where: str, error: BaseException, passes: type[EmssdError] = DraftError) -> NoReturn:
    """Raise an error of the plugin `owner`, `SystemExit` too, as a sentence; Ctrl-C and what `passes` as they are.

    Args:
        owner: how messages call the plugin.
        where: which of its functions was called.
    """
    if isinstance(error, (KeyboardInterrupt, passes)):
        raise error
    raise PluginError(f"{owner} failed in {where}: {described(error)}") from error


@contextmanager
def guarded(owner: str, where: str) -> Iterator[None]:
    """For a body that calls a plugin, outside of steps: see `blame`. Errors of emssd pass as they are."""
    try:
        yield
    except BaseException as error:
        blame(owner, where, error, EmssdError)


@contextmanager
def named_if_slow(owner: str, way_out: str) -> Iterator[None]:
    """Says on stderr that `owner` is being loaded, if the body takes long: it may hang, and nobody else would know."""
    message = f"emssd: {owner} is still being loaded after {_SLOW_SECONDS:g} s; {way_out}"
    timer = threading.Timer(_SLOW_SECONDS, lambda: print(message, file=sys.stderr, flush=True))
    timer.name, timer.daemon = "emssd-slow-plugin", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
