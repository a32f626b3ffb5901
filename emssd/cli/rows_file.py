"""The file of an experiment's rows: one flushed JSON line per run, so that a crash loses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import msgspec

from emssd.cli.lines_file import LinesFile
from emssd.errors import ConfigError

__all__ = ["AROUND", "RowsFile"]

AROUND = frozenset({"resume", "overwrite", "output_dir", "progress", "figures"})
"""Options that say where a run goes and how it is shown, not what it is."""


class _Job(msgspec.Struct):
    job: int
    overrides: list[str]

    def name(self) -> str:
        return f"the job {self.job}"


class RowsFile:
    """``rows.jsonl`` in the folder of an experiment.

    What is there is read at once, and changed only when the first new row is ready.

    Args:
        folder: made if it does not exist.
        resume: keep the rows that are there, and do not run their jobs again.

    Raises:
        OutputError: it cannot be written, at once or later (disk full); another experiment writes to it; or it holds
            rows, and neither `resume` nor `overwrite` says what to do; or, with `resume`, a line that is no row.
    """

    def __init__(self, folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = folder / "rows.jsonl"
        self._file = LinesFile(self.path)
        try:
            rows = self._file.earlier("experiment", _Job, _Job.name, resume=resume, overwrite=overwrite)
            self._rows = [row for row, _ in rows]
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let others write to it."""
        self._file.close()

    def has(self, job: int, overrides: Seq[str]) -> bool:
        """Whether job number `job` of the sweep is done. Raises ConfigError: it was another job then."""
        there = next((row for row in self._rows if row["job"] == job), None)
        if there is None:
            return False
        before, now = _what(there["overrides"]), _what(overrides)
        if before != now:
            raise ConfigError(
                f"resume=true: job {job} of {self.path} was {' '.join(before)}, and is now {' '.join(now)}; "
                f"go on with the same command, or start again with overwrite=true"
            )
        return True

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, at once, to the disk itself: a run is worth more than the milliseconds that takes."""
        line = json.dumps(row)  # in ASCII, for readers that split at U+2028 as well
        self._file.append(f"{line}\n".encode())
        self._rows.append(json.loads(line))

    def read(self) -> list[dict[str, Any]]:
        """All rows that are kept."""
        return self._rows


def _what(overrides: Seq[str]) -> list[str]:
    """The overrides that determine the run; the others say where it goes and how it is shown."""
    return [item for item in overrides if item.partition("=")[0] not in AROUND]
