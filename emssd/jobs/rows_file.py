"""The file of an experiment's rows: one flushed JSON line per run, so that a crash loses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from emssd.data.records import read_json
from emssd.errors import ConfigError, OutputError
from emssd.jobs.lines_file import LinesFile

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
        self._there: dict[int, list[str]] = {}
        self._rows: list[bytes] = []
        try:
            self._file = LinesFile(self.path)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; set output_dir to a writable folder"
            ) from error
        try:
            if resume:
                self._keep()
            elif not self._file.is_empty and not overwrite:
                raise OutputError(
                    f"output_dir={folder} holds the rows of an earlier experiment; resume=true goes on with it, "
                    f"overwrite=true replaces it, or set output_dir to another folder"
                )
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let others write to it."""
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
        line = (json.dumps(row) + "\n").encode()  # in ASCII, for readers that split at U+2028 as well
        try:
            self._file.append(line)
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; the rows before are kept. "
                f"Make room, and go on with resume=true"
            ) from error
        self._rows.append(line)

    def read(self) -> list[dict[str, Any]]:
        """All rows that are kept."""
        return [json.loads(line) for line in self._rows]

    def _keep(self) -> None:
        """Keep the rows that are there."""
        self._rows = self._file.keep()
        for number, line in enumerate(self._rows, start=1):
            try:
                row = read_json(line)
            except ValueError:
                row = None
            job, overrides = (row.get("job"), row.get("overrides")) if isinstance(row, dict) else (None, None)
            if type(job) is not int or not isinstance(overrides, list) or {*map(type, overrides)} - {str}:
                raise OutputError(
                    f"resume=true: {self.path}:{number} is no row of an experiment; take that line out, and its job "
                    f"runs again, or start again with overwrite=true"
                )
            if job in self._there:
                raise OutputError(
                    f"resume=true: {self.path}:{number} is a second row of job {job}; take one of the two out, or "
                    f"start again with overwrite=true"
                )
            self._there[job] = overrides


def _what(overrides: Seq[str]) -> list[str]:
    """Those that say what runs; the others say where and how it is shown."""
    return [item for item in overrides if item.partition("=")[0] not in AROUND]
