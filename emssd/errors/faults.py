"""The border at which plugins are called: whatever one does there becomes a sentence that names it."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from emssd.errors import DraftError, EmssdError, PluginError, PluginWarning

__all__ = ["guarded", "named_if_slow", "process_kept", "told"]

_SLOW_SECONDS = 5.0
_LONGEST = 600  # characters of a stranger's message


def told(error: BaseException) -> str:
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


class process_kept:  # noqa: N801  # a context manager, as those of contextlib
    """For a call of a plugin: what it changes for the whole process is changed back, and is an error.

    That is PyTorch's default dtype and device and autocast, filters that make errors of warnings, and variables that
    are taken out of the environment. `in_step`, these are not compared, as that takes 40 µs. Raises PluginError: it has
    changed something; this comes after what the body raises.
    """

    def __init__(self, *, in_step: bool = False) -> None:
        self._in_step = in_step

    def __enter__(self) -> None:
        self._before, self._environment = _settings(), {} if self._in_step else dict(os.environ)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool | None:
        if (left := self._left_behind()) and error is None:
            raise left
        return None

    def _left_behind(self) -> PluginError | None:
        """The error that names what the body has changed, which is changed back."""
        if _settings() == self._before and self._in_step:
            return None
        changed = _changed_back(self._before)
        if self._environment and (gone := self._environment.keys() - os.environ.keys()):
            os.environ.update({name: self._environment[name] for name in gone})
            changed.append("os.environ")
        if not changed:
            return None
        return PluginError(f"it left {' and '.join(changed)} changed for the whole process; it must set that back")


class guarded(process_kept):  # noqa: N801
    """An exception of a plugin in the body, `SystemExit` too, becomes a sentence; errors of emssd pass as they are.

    In a step, of these only a `DraftError` passes. It also is a `process_kept`.

    Args:
        owner: how messages call the plugin.
        where: which of its functions the body calls.
        failed: gets the error in place of the caller; the body then ends as if it had succeeded.
    """

    def __init__(
        self, owner: str, where: str, *, in_step: bool = False, failed: Callable[[PluginError], None] | None = None
    ) -> None:
        self._owner, self._where, self._in_step, self._failed = owner, where, in_step, failed

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None and self._in_step and _settings() == self._before:
            return False  # as nearly always
        left = self._left_behind()
        reason = error or left
        if reason is None or isinstance(error, KeyboardInterrupt):
            return False
        passes = DraftError if self._in_step else EmssdError
        if not isinstance(reason, passes) or (left is not None and reason is left):
            failure = PluginError(f"{self._owner} failed in {self._where}: {told(reason)}")
            failure.__cause__ = reason
        elif self._failed is None:
            return False  # it passes as it is
        else:
            assert isinstance(reason, PluginError)
            failure = reason
        if self._failed is None:
            raise failure from reason
        self._failed(failure)
        return True


def _settings() -> tuple[Any, ...]:
    """In the order of `_changed_back`; of PyTorch as it is when it is imported, where it is not yet."""
    filters, torch = tuple(warnings.filters), sys.modules.get("torch")
    if torch is None:
        return filters, None, [], False, False
    modes, autocast = torch.overrides._get_current_function_mode_stack(), torch.is_autocast_enabled
    return filters, torch.get_default_dtype(), modes, autocast("cpu"), autocast("cuda")


def _changed_back(before: tuple[Any, ...]) -> list[str]:
    """The names of the settings that were others `before`."""
    old, dtype, modes, *autocasts = before
    (filters, *now), changed = _settings(), list[str]()
    if any(each[0] == "error" and each not in old and issubclass(PluginWarning, each[2]) for each in filters):
        warnings.filters[:] = old  # type: ignore[index]  # a list, whatever its stub says
        warnings._filters_mutated()  # type: ignore[attr-defined]  # as its own functions do
        changed.append("warnings.filters")
    if (torch := sys.modules.get("torch")) is None:
        return changed
    if now[0] != (dtype or torch.float32):
        torch.set_default_dtype(dtype or torch.float32)
        changed.append("the default dtype")
    if now[1] != modes:
        torch.set_default_device(None)
        while torch.overrides._len_torch_function_stack():
            torch.overrides._pop_mode()
        for mode in modes:
            torch.overrides._push_mode(mode)
        changed.append("the default device")
    for kind, was, is_on in zip(("cpu", "cuda"), autocasts, now[2:], strict=True):
        if was != is_on:
            torch.set_autocast_enabled(kind, was)
            changed.append("autocast")
    return changed


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
