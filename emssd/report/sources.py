"""Finds the rows of experiments and the plain runs of a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from emssd.data.typed import read_json, typed
from emssd.errors import ConfigError
from emssd.report.rows import Row, Simulation, read_rows

__all__ = ["Material", "PlainRun", "read"]

_HOW = (
    "an experiment makes rows (python -m emssd -m experiment=fig1 output_dir=DIR), a run makes metrics.json "
    "(python -m emssd output_dir=DIR)"
)


class _RunMetrics(msgspec.Struct):
    title: str
    decode_tokens_per_second: float
    tokens_per_second: float
    mean_acceptance_length: float
    num_new_tokens: int


class PlainRun(NamedTuple):
    """A run of the command line that is no part of an experiment: its folder, and its ``metrics.json``."""

    name: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Material:
    """All that a report shows."""

    rows: list[Row] = field(default_factory=list)
    simulations: list[Simulation] = field(default_factory=list)
    runs: list[PlainRun] = field(default_factory=list)


def read(paths: Iterable[Path]) -> Material:
    """Read files and folders, which are searched; each file is read once. Raises ConfigError: there is no such path,
    nothing to show in a folder, or a file of another kind.
    """
    material = Material()
    for file in {file.resolve(): file for path in paths for file in _files(path)}.values():
        _add(file, material)
    return material


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(f"there is no {path}; give folders of experiments or runs, rows.jsonl files")
    found = [path] if path.is_file() else list(_found(path))
    if not found:
        raise ConfigError(f"there are neither rows in a rows.jsonl nor a metrics.json anywhere in {path}; {_HOW}")
    return found


def _found(folder: Path) -> Iterator[Path]:
    """An experiment's rows stand for the runs in its own numbered folders."""
    for name in ("rows.jsonl", "metrics.json"):
        file = folder / name
        if file.is_file() and file.stat().st_size:  # an experiment that has just begun has no rows
            yield file
    of_experiment = (folder / "rows.jsonl").is_file()
    for below in sorted((each for each in folder.iterdir() if each.is_dir()), key=_by_number):
        if not (of_experiment and below.name.isdecimal()):
            yield from _found(below)


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else -1, path.name)


def _add(file: Path, material: Material) -> None:
    if file.suffix == ".jsonl":
        for row in read_rows(file):
            if isinstance(row, Row):
                material.rows.append(row)
            else:
                material.simulations.append(row)
        return
    try:
        value = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict) or "decode_tokens_per_second" not in value:
        raise ConfigError(f"{file} is no metrics.json; {_HOW}")
    try:
        typed(value, _RunMetrics)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; it was written by another version of emssd, run again") from None
    material.runs.append(PlainRun(str(file.parent), value))
