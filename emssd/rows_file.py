"""The file of an experiment's rows: one flushed JSON line per run, so that a crash loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

from emssd.errors import ConfigError, OutputError
from emssd.output import lock

__all__ = ["AROUND", "RowsFile"]

AROUND = frozenset({"resume", "overwrite", "output_dir", "progress"})
"""Options that say where a run goes and how it is shown, not what it is."""


class RowsFile:
    """``rows.jsonl`` in the folder of an experiment.

    What is there is read at once, and changed only when the first new row is ready.

    Args:
        folder: made if it does not exist.
        resume: keep the rows that are there, and do not run their jobs again.
        overwrite: replace them.

    Raises:
        OutputError: it cannot be written, at once or later (disk full); another experiment writes to it; or it holds
            rows, and neither `resume` nor `overwrite` says what to do; or, with `resume`, a line that is no row.
    """

    def __init__(self, folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = folder / "rows.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; set output_dir to a writable folder"
            ) from error
        self._kept_bytes = 0
        self._there: dict[int, list[str]] = {}
        try:
            lock(self._file.fileno(), folder)
            if os.fstat(self._file.fileno()).st_size:
                if resume:
                    self._keep()
                elif not overwrite:
                    raise OutputError(
                        f"output_dir={folder} holds the rows of an earlier experiment; resume=true goes on with it, "
                        f"overwrite=true replaces it, or set output_dir to another folder"
                    )
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let others write to it."""
        with suppress(OSError):  # of a row that could not be written, which `append` has said
            self._file.close()

    def has(self, job: int, overrides: Seq[str]) -> bool:
        """Whether job number `job` of the sweep is done.

        Raises:
            ConfigError: it was another job then.
        """
        if job not in self._there:
            return False
        before, now = _what(self._there[job]), _what(overrides)
        if before != now:
            raise ConfigError(
                f"resume=true: job {job} of {self.path} was {' '.join(before)}, and is now {' '.join(now)}; "
                f"go on with the same command, or start again with overwrite=true"
            )
        return True

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, at once, to the disk itself: a run is worth more than the milliseconds that takes."""
        try:
            if os.fstat(self._file.fileno()).st_size > self._kept_bytes:
                self._file.truncate(self._kept_bytes)
            self._file.write((json.dumps(row) + "\n").encode())  # in ASCII, for readers that split at U+2028 as well
            self._file.flush()
            os.fsync(self._file.fileno())
            self._kept_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; the rows before are kept. "
                f"Make room, and go on with resume=true"
            ) from error

    def read(self) -> list[dict[str, Any]]:
        """All rows that are kept."""
        return [json.loads(line) for line in self._lines()]

    def _keep(self) -> None:
        """Keep all whole lines; what follows the last newline was being written when the experiment was killed."""
        self._file.seek(0)
        self._kept_bytes = self._file.read().rfind(b"\n") + 1
        for number, line in enumerate(self._lines(), start=1):
            try:
                row = json.loads(line)
                self._there[int(row["job"])] = [str(item) for item in row["overrides"]]
            except (ValueError, TypeError, KeyError) as error:
                raise OutputError(
                    f"resume=true: {self.path}:{number} is no row of an experiment; take that line out, and its job "
                    f"runs again, or start again with overwrite=true"
                ) from error

    def _lines(self) -> list[bytes]:
        self._file.seek(0)
        return self._file.read(self._kept_bytes).split(b"\n")[:-1]


def _what(overrides: Seq[str]) -> list[str]:
    """Those that say what runs; the others say where and how it is shown."""
    return [item for item in overrides if item.partition("=")[0] not in AROUND]
