"""Runs a command of ``emssd-plugins`` in a process of its own, so that a plugin that ends or hangs it can be named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emssd.errors import PluginError

if TYPE_CHECKING:
    from emssd.hooks.registry import Registry

__all__ = ["Notes", "run_watched"]

_LOAD_SECONDS = 60.0
_EXIT_SECONDS = 10.0  # for threads of a plugin that outlive the command
_POLL_SECONDS = 0.1


class Notes:
    """The current activity of the process, in a file that outlives it; without a file, nothing is noted."""

    variable = "EMSSD_PLUGINS_NOTES"

    def __init__(self, path: str | None = None) -> None:
        self._path = path

    @property
    def is_watched(self) -> bool:
        return self._path is not None

    def registry(self) -> Registry:
        """All plugins. The caller shows which of them failed, so that nothing warns of these."""
        from emssd.hooks.registry import Registry

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Registry(on_load=lambda owner: self.note(owner, "while it was loaded", _LOAD_SECONDS))

    def note(self, owner: str, doing: str, limit: float | None = None) -> None:
        """From now on, `owner` does `doing`, for at most `limit` seconds."""
        self._write({"owner": owner, "doing": doing, "limit": limit})

    def done(self, status: int) -> None:
        self._write({"status": status, "limit": _EXIT_SECONDS})

    def _write(self, values: dict[str, Any]) -> None:
        if self._path is not None:
            part = Path(f"{self._path}.part")
            part.write_text(json.dumps(values))
            part.replace(self._path)  # whole, whenever it is read


def run_watched(arguments: Seq[str]) -> int:
    """Run ``emssd-plugins`` with `arguments`. Returns its exit status. Raises PluginError: the process ended before its
    command did, or did one thing for longer than it may.
    """
    with tempfile.TemporaryDirectory(prefix="emssd-plugins-") as folder:
        notes = Path(folder) / "notes.json"
        notes.write_text("{}", encoding="utf-8")
        path = os.pathsep.join(part for part in sys.path if part)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "emssd_testing.authoring", *arguments],
            env=os.environ | {Notes.variable: str(notes), "PYTHONPATH": path},
        )
        try:
            return _watch(child, notes)
        finally:
            child.kill()  # nothing happens to one that has ended
            child.wait()


def _watch(child: subprocess.Popen[bytes], notes: Path) -> int:
    text, since = "", time.monotonic()
    while (ended := child.poll()) is None:
        if (latest := notes.read_text(encoding="utf-8")) != text:
            text, since = latest, time.monotonic()
        limit = json.loads(text).get("limit")
        if limit is not None and time.monotonic() - since > limit:
            break
        time.sleep(_POLL_SECONDS)
    values = json.loads(notes.read_text(encoding="utf-8"))
    if "status" in values:
        return int(values["status"])
    what = f"{values.get('owner', 'a plugin')} {{}} {values.get('doing', 'before anything was loaded')}"
    if ended is None:
        raise PluginError(what.format(f"was stopped after {values['limit']:g} s") + _WAYS_OUT)
    how = f"exit status {ended}" if ended >= 0 else signal.Signals(-ended).name
    raise PluginError(what.format(f"ended the process ({how})") + _WAYS_OUT)


_WAYS_OUT = "; EMSSD_SKIP_PLUGINS=NAME leaves a plugin out, --timeout gives a test of check longer"
