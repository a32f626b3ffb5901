"""Every error that emssd raises on purpose; each message names the request, the possibilities and the way out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

__all__ = [
    "CompileError",
    "ConfigError",
    "DraftError",
    "EmssdError",
    "GroupError",
    "OutOfMemoryError",
    "OutputError",
    "PluginError",
    "PluginWarning",
    "PromptError",
    "UnsupportedModelError",
    "exit_on_error",
]


class EmssdError(Exception):
    """Base of all errors of emssd. The command line prints its message without a traceback.

    Attributes:
        finished: where `Engine.generate` raises it, each `Generation` that was finished before.
    """

    finished: Seq[Any] = ()


class ConfigError(EmssdError, ValueError):
    """An option has a value that cannot work."""


class PromptError(EmssdError, ValueError):
    """A prompt or a prompt source cannot be used."""


class OutputError(EmssdError, OSError):
    """Results cannot be written."""


class UnsupportedModelError(EmssdError):
    """A model that emssd cannot serve without changing its output; the message holds the reason."""


class CompileError(EmssdError):
    """A model cannot be compiled; the message says why. It can run as it is."""


class GroupError(EmssdError):
    """A process of a tensor parallel run has ended, or has gone another way than the rest."""


class OutOfMemoryError(EmssdError):
    """The KV cache, or the device, has no room left; the message names the option that lowers the need."""


class PluginError(EmssdError):
    """A plugin is missing, broken, or failed while it ran; the message names it and its distribution."""


class PluginWarning(UserWarning):
    """A plugin could not be used, or no longer; what else runs is not affected."""


class DraftError(PluginError):
    """A drafter broke a rule of its interface.

    Attributes:
        rule: which, as in ``docs/reference/drafter_rules.md``.
    """

    def __init__(self, message: str, rule: str = "draft") -> None:
        super().__init__(message)
        self.rule = rule


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """For the body of a command: an error of ours ends the process with status 2, its message after `program`."""
    try:
        yield
    except EmssdError as error:
        message = re.sub(r"\S{300,}", lambda word: f"{word[0][:200]}…", str(error))  # nobody needs all of a long value
        print(f"{program}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """For a message on an unknown `name`: ``; did you mean 'llma'?``, or ``""`` where nothing is near."""
    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
