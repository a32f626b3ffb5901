"""The rows of experiments, the simulations and the plain runs of a report: found in folders, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from emssd.data.typed import read_json, typed
from emssd.errors import ConfigError
from emssd_lab.costs import Costs

__all__ = ["Hardware", "Material", "Row", "Simulation", "parse", "read", "read_rows"]

_HOW = (
    "an experiment makes rows (python -m emssd -m experiment=fig1 output_dir=DIR), a run makes metrics.json "
    "(python -m emssd output_dir=DIR)"
)


class Metrics(msgspec.Struct, frozen=True):
    """The figures of a row, as in ``metrics.json``."""

    decode_tokens_per_second: float
    mean_acceptance_length: float
    acceptance_histogram: dict[int, int]
    draft_length_histogram: dict[int, int]
    padding_per_new_token: float
    padding_ratio: float
    input_padding_tokens: int
    kv_padding_slots: int
    num_new_tokens: int
    decode_steps: int
    decode_row_steps: int
    decode_new_tokens: int
    decode_computed_tokens: int
    decode_kv_tokens: int
    decode_seconds: dict[str, float]
    median_decode_step_seconds: float
    draft_depth_histogram: dict[int, int] | None = None
    other_cpu_share: float | None = None


class Samples(msgspec.Struct, frozen=True):
    """Figures of each prompt, in their order."""

    acceptance_length: list[float]
    num_prompt_tokens: list[int]
    num_new_tokens: list[int]


class Hardware(msgspec.Struct, frozen=True):
    """A machine, with its rates if they were measured."""

    processor: str
    threads: int
    device: str
    bytes_per_second: float = 0.0
    flops_per_second: float = 0.0

    @property
    def name(self) -> str:
        """The processor, or the GPU with its host's processor."""
        processor = f"{self.processor}, {self.threads} threads"
        return processor if self.device == "cpu" else f"{self.device} ({processor})"


class Provenance(msgspec.Struct, frozen=True):
    """The origin of a row."""

    command: str
    commit: str | None
    date: str
    versions: dict[str, str]
    hardware: Hardware
    seed: dict[str, Any] = {}


class Row(msgspec.Struct, frozen=True):
    """One run of an experiment: one cell, one repeat. Names are those of ``rows.jsonl``, see ``docs/reports.md``.

    Attributes:
        source: the file that it comes from; rows are compared within a file.
        costs: of the target.
        options: those that are not the defaults and have no field of their own, as ``NAME=VALUE``.
    """

    source: str
    experiment: str
    size: str
    repeat: int
    method: str | None
    speculate: bool
    batch_size: int
    model: str
    random_weights: bool
    replay: str | None
    drafter_options: str
    backend_options: str
    budget_options: str
    data: str
    data_label: str | None
    dtype: str
    max_new_tokens: int
    batching: str
    metrics: Metrics
    samples: Samples
    costs: Costs
    provenance: Provenance
    options: tuple[str, ...] = ()
    compiled: bool = False

    def __post_init__(self) -> None:
        if not (self.provenance.hardware.bytes_per_second and self.provenance.hardware.flops_per_second):
            raise ValueError("it has no provenance.hardware.bytes_per_second and flops_per_second")


class Point(msgspec.Struct, frozen=True):
    """Expected and simulated values at one p and batch size, see `appendix_points`."""

    p: float
    batch_size: int
    exact: dict[str, float]
    simulated: dict[str, dict[str, float]]


class Simulation(msgspec.Struct, frozen=True):
    """The paper's numerical simulation (Appendix B)."""

    source: str
    experiment: str
    points: list[Point]
    max_acceptance: int
    provenance: Provenance


class _Needed(msgspec.Struct):
    """Fields of a ``metrics.json`` that each run has."""

    title: str
    decode_tokens_per_second: float
    tokens_per_second: float
    mean_acceptance_length: float
    num_new_tokens: int


class Material(NamedTuple):
    """All that a report shows; `runs` are no part of an experiment: the ``metrics.json`` by their folders."""

    rows: list[Row]
    simulations: list[Simulation]
    runs: dict[str, Mapping[str, Any]]


def read(paths: Iterable[Path]) -> Material:
    """Read files and folders, which are searched; each file is read once."""
    material = Material([], [], {})
    for file in {file.resolve(): file for path in paths for file in _files(path)}.values():
        if file.suffix == ".jsonl":
            rows = read_rows(file)
            material.rows.extend(row for row in rows if isinstance(row, Row))
            material.simulations.extend(row for row in rows if isinstance(row, Simulation))
        elif (metrics := _read_run(file)) is not None:
            material.runs[str(file.parent)] = metrics
    return material


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(f"there is no {path}; give folders of experiments or runs, rows.jsonl files")
    files = [path] if path.is_file() else list(_files_in(path))
    if not files:
        raise ConfigError(f"there are neither rows in a rows.jsonl nor a metrics.json anywhere in {path}; {_HOW}")
    return files


def _files_in(folder: Path) -> Iterator[Path]:
    """An experiment's rows stand for the runs in its own numbered folders."""
    for file in (folder / "rows.jsonl", folder / "metrics.json"):
        if file.is_file() and file.stat().st_size:  # an experiment that has just begun has no rows
            yield file
    of_experiment = (folder / "rows.jsonl").is_file()
    folders = (below for below in folder.iterdir() if below.is_dir())
    for below in sorted(folders, key=lambda path: (int(path.name) if path.name.isdecimal() else -1, path.name)):
        if not (of_experiment and below.name.isdecimal()):
            yield from _files_in(below)


def _read_run(file: Path) -> dict[str, Any] | None:
    """The metrics of a run, or ``None``: a resumed job had nothing left to do, and its figures were lost before."""
    try:
        value = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict) or "decode_tokens_per_second" not in value:
        if isinstance(value, dict) and "num_resumed_prompts" in value:
            return None
        raise ConfigError(f"{file} is no metrics.json; {_HOW}")
    try:
        typed(value, _Needed)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; it was written by another version of emssd, run again") from None
    return value


def read_rows(path: Path) -> list[Row | Simulation]:
    """The rows of a ``rows.jsonl``, which must have some."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    rows = []
    for where, line in ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            value = read_json(line)
        except ValueError:
            raise ConfigError(
                f"{where} is no JSON; if the experiment was interrupted there, resume=true goes on with it and mends it"
            ) from None
        rows.append(parse(value, str(path), where))
    if not rows:
        raise ConfigError(f"{path} holds no rows yet; its experiment writes one at the end of each of its runs")
    return rows


def parse(row: Any, source: str = "", where: str = "row") -> Row | Simulation:
    """One row from its JSON value. Raises ConfigError, which names the field that is missing or has another form."""
    if not isinstance(row, dict) or "experiment" not in row:
        raise ConfigError(f"{where} is no row of an experiment; python -m emssd -m experiment=NAME writes such rows")
    try:
        row = row | {"source": source}
        return typed(row, Simulation) if "points" in row else typed(row, Row)
    except ValueError as error:
        raise ConfigError(
            f"{where} is of another format: {error}; run the experiment again with this version of emssd"
        ) from None
