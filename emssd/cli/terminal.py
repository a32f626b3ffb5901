"""Consoles of the commands, and their end after a failed stream or Ctrl-C. Nothing heavy is imported here."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from emssd.errors import exit_on_error

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["INTERRUPTED", "plain_console", "steady"]

INTERRUPTED = 130  # status of a program that Ctrl-C has stopped
_NARROWEST = 40  # columns: in fewer, a table has no room for its borders


def plain_console(**options: Any) -> Console:
    """A console that prints words as they stand: paths, ids and options may look like Rich's markup, emoji or numbers.

    Results go to stdout; what is said on the way goes to stderr, with ``stderr=True``.

    Args:
        options: of `rich.console.Console`.
    """
    from rich.console import Console

    for stream in (sys.stdout, sys.stderr):  # here as well as in `steady`: a launcher's processes have no `main`
        _take_any_text(stream)
    console = Console(markup=False, emoji=False, highlight=False, **options)
    if console.width < _NARROWEST:
        console.width = _NARROWEST
    return console


@contextmanager
def steady(program: str, *, if_interrupted: str = "") -> Iterator[None]:
    """For the body of a command, or as the decorator of its ``main``: it ends without a traceback.

    An error of emssd ends it with status 2, its message after `program`.

    A character that the encoding of a stream lacks becomes a question mark. A stream that takes no more, as of
    ``| head -1`` or on a full disk, does not stop the command: all later output to it is dropped. For anything but a
    closed pipe, the command then ends with a sentence and status 2. Ctrl-C ends it with status 130, and a message that
    ends with `if_interrupted`; the second one does so at once.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        _take_any_text(stream)
    out, err = map(_Outlet, before)
    if sys.stdout is not None:  # None: it was closed beforehand, and `print` knows what that means
        sys.stdout = out
    if sys.stderr is not None:
        sys.stderr = err
    end: SystemExit | None = None
    try:
        with _interrupts(), exit_on_error(program):
            yield
    except KeyboardInterrupt:
        print("; ".join(filter(None, (f"{program}: interrupted", if_interrupted))), file=err)
        end = SystemExit(INTERRUPTED)
    except SystemExit as error:
        end = error
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
    failure = None if isinstance(out.error, BrokenPipeError) else out.error
    if failure is not None and not (end and end.code):
        print(f"{program}: error: cannot print to stdout: {failure.strerror}; files are written as ever", file=err)
        raise SystemExit(2) from None
    if end is not None:
        raise end


class _Outlet:
    """A standard stream that raises no error: what it cannot take is dropped, and why is kept in `error`."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._call("write", text)
        return len(text)

    def flush(self) -> None:
        self._call("flush")

    def _call(self, method: str, *arguments: str) -> None:
        try:
            if self.error is None and self._stream is not None:
                getattr(self._stream, method)(*arguments)
        except OSError as error:
            self.error = error
            # The rest in the stream's buffer would fail again when Python flushes it at the end.
            with suppress(AttributeError, OSError, ValueError):  # one that has no descriptor
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)


def _take_any_text(stream: TextIO | None) -> None:
    """Let `stream` write a question mark for a character that its encoding lacks."""
    if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # of what has it


@contextmanager
def _interrupts() -> Iterator[None]:
    """The first Ctrl-C raises `KeyboardInterrupt`; a second one, however late, ends the process at once."""
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        if came:
            os._exit(INTERRUPTED)
        came = True
        raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    # A process whose parent had it ignore Ctrl-C, as a script's `&` does, goes on ignoring it.
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if not came:
            signal.signal(signal.SIGINT, signal.default_int_handler)
