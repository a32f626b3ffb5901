"""The runs of sweeps that failed, from the ``failed.jsonl`` that a sweep leaves in its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from emssd.data.typed import read_json
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import code, escape

__all__ = ["failed_runs"]


def failed_runs(paths: Iterable[Path]) -> list[Section]:
    """A section with each failed run's options and its reason, if there are some."""
    files = [file for path in paths if path.is_dir() for file in sorted(path.rglob("failed.jsonl"))]
    runs = [read_json(line) for file in files for line in file.read_bytes().splitlines()]
    listed = [f"- {code(' '.join(run['overrides']))}: {escape(run['error'])}" for run in runs]
    return [Section("failed", "Runs that failed", "\n".join(listed))] if listed else []
