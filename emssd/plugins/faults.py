"""What is said of a plugin that fails, or takes long, before a run: always which one it is, and whose."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from emssd.errors import EmssdError, PluginError

__all__ = ["guarded", "named_if_slow", "told"]

_SLOW_SECONDS = 5.0
_LONGEST = 600  # characters of a stranger's message


def told(error: BaseException) -> str:
    """What went wrong, in one printable line with the class of the exception; a `PluginError` needs none."""
    try:
        text = str(error)
    except BaseException as other:  # a stranger's exception may be as broken as what raised it
        text = f"no message, as that raises {type(other).__name__}"
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
    if type(error) is PluginError:
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


@contextmanager
def guarded(owner: str, where: str) -> Iterator[None]:
    """Whatever a plugin raises in the body, `SystemExit` too, becomes a sentence; errors of emssd pass as they are.

    Args:
        owner: how messages call the plugin.
        where: which of its functions the body calls.

    Raises:
        PluginError: in the place of the plugin's own exception.
    """
    try:
        yield
    except (EmssdError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(f"{owner} failed in {where}: {told(error)}") from error


@contextmanager
def named_if_slow(owner: str, way_out: str) -> Iterator[None]:
    """Says on stderr that `owner` is being loaded, if the body takes long: it may hang, and nobody else would know."""
    said = f"emssd: {owner} is still being loaded after {_SLOW_SECONDS:g} s; {way_out}"
    timer = threading.Timer(_SLOW_SECONDS, lambda: print(said, file=sys.stderr, flush=True))
    timer.name, timer.daemon = "emssd-slow-plugin", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
