"""``rows.jsonl``: one JSON line per run of an experiment, each flushed at once, so that a crash loses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import msgspec

from emssd.cli.lines_file import LinesFile
from emssd.cli.setting import AROUND
from emssd.errors import ConfigError

__all__ = ["RowsFile"]


class _Job(msgspec.Struct):
    job: int
    overrides: list[str]


class RowsFile:
    """The file in the folder of an experiment, with all `rows` that are kept; see `LinesFile.earlier`."""

    def __init__(self, folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self._file = LinesFile(folder / "rows.jsonl")
        self.path, self.close = self._file.path, self._file.close
        earlier = self._file.earlier(
            "experiment", _Job, lambda row: f"the job {row.job}", resume=resume, overwrite=overwrite
        )
        self.rows: list[dict[str, Any]] = [row for row, _ in earlier]

    def check(self) -> None:
        """Raises ConfigError: a row that is kept is of another format."""
        from emssd_lab.report.rows import parse

        for number, row in enumerate(self.rows, start=1):
            try:
                parse(row, where=f"{self.path}:{number}")
            except ConfigError as error:
                raise ConfigError(
                    f"resume=true: {error}. With overwrite=true all of its jobs run again; if you take that line out, "
                    f"only its own does"
                ) from None

    def has(self, job: int, overrides: Seq[str]) -> bool:
        """Whether job number `job` of the sweep is done; it may have been another job then, which is an error."""
        row = next((row for row in self.rows if row["job"] == job), None)
        if row is None:
            return False
        before, now = (  # what determines the run
            [item for item in items if item.partition("=")[0] not in AROUND] for items in (row["overrides"], overrides)
        )
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
        self.rows.append(json.loads(line))
