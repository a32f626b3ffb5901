"""The rows of experiments, the simulations and the plain runs of a report: found in folders, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from emssd.data.typed import read_json, typed
from emssd.errors import ConfigError

__all__ = ["Material", "PlainRun", "Row", "Simulation", "machine_name", "parse", "per", "read", "read_rows"]

_HOW = (
    "an experiment makes rows (python -m emssd -m experiment=fig1 output_dir=DIR), a run makes metrics.json "
    "(python -m emssd output_dir=DIR)"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One run of an experiment: one cell, one repeat. Names are those of ``rows.jsonl``, see ``docs/reports.md``.

    Attributes:
        source: the file that it comes from; rows are compared within a file.
        metrics: as in ``metrics.json``.
        samples: of each prompt, in their order.
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
    metrics: Mapping[str, Any]
    samples: Mapping[str, Seq[float]]
    costs: Mapping[str, int]
    provenance: Mapping[str, Any]
    options: tuple[str, ...] = ()
    compiled: bool = False

    @property
    def rate(self) -> float:
        """Tokens/s of decode steps."""
        return float(self.metrics["decode_tokens_per_second"])


@dataclass(frozen=True, slots=True)
class Simulation:
    """The paper's numerical simulation (Appendix B): expected values by p and batch size, see `appendix_points`."""

    source: str
    experiment: str
    points: Seq[Mapping[str, Any]]
    max_acceptance: int
    provenance: Mapping[str, Any]


class PlainRun(NamedTuple):
    """A run of the command line that is no part of an experiment: its folder, and its ``metrics.json``."""

    name: str
    metrics: Mapping[str, Any]


class Material(NamedTuple):
    """All that a report shows."""

    rows: list[Row]
    simulations: list[Simulation]
    runs: list[PlainRun]


def _with(*names: str, **groups: Any) -> type[msgspec.Struct]:
    """An object with these fields of any kind, and these groups of fields."""
    return msgspec.defstruct("Needed", [*names, *groups.items()])


_PROVENANCE, _HARDWARE = ("command", "commit", "date", "versions"), ("processor", "threads", "device")
_MEASURED = _with(
    metrics=_with(
        "decode_tokens_per_second", "mean_acceptance_length", "acceptance_histogram", "draft_length_histogram",
        "padding_per_new_token", "padding_ratio", "input_padding_tokens", "kv_padding_slots", "num_new_tokens",
        "decode_steps", "decode_row_steps", "decode_new_tokens", "decode_computed_tokens", "decode_kv_tokens",
        "decode_seconds", "median_decode_step_seconds",
    ),
    samples=_with("acceptance_length", "num_prompt_tokens", "num_new_tokens"),
    costs=_with("weight_bytes", "kv_bytes_per_token", "matmul_parameters", "attention_flops_per_kv_token"),
    provenance=_with(*_PROVENANCE, hardware=_with(*_HARDWARE, "bytes_per_second", "flops_per_second")),
)  # fmt: skip
_SIMULATED = _with(
    points=list[_with("p", "batch_size", "exact", "simulated")],  # type: ignore[misc]  # made here
    provenance=_with(*_PROVENANCE, hardware=_with(*_HARDWARE)),
)
_RUN = _with(
    title=str, decode_tokens_per_second=float, tokens_per_second=float, mean_acceptance_length=float, num_new_tokens=int
)


def machine_name(hardware: Mapping[str, Any]) -> str:
    """The processor, or the GPU with the processor behind it."""
    device = str(hardware["device"])
    processor = f"{hardware['processor']}, {hardware['threads']} threads"
    return processor if device == "cpu" else f"{device} ({processor})"


def per(total: str, number: str) -> Callable[[Row], float]:
    """A metric that adds up ÷ one that counts, as a function of a row; 0 where nothing was counted."""
    return lambda row: float(row.metrics[total]) / max(row.metrics[number], 1)


def read(paths: Iterable[Path]) -> Material:
    """Read files and folders, which are searched; each file is read once."""
    material = Material([], [], [])
    for file in {file.resolve(): file for path in paths for file in _files(path)}.values():
        if file.suffix == ".jsonl":
            rows = read_rows(file)
            material.rows.extend(row for row in rows if isinstance(row, Row))
            material.simulations.extend(row for row in rows if isinstance(row, Simulation))
        elif (run := _read_run(file)) is not None:
            material.runs.append(run)
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
    for file in (folder / "rows.jsonl", folder / "metrics.json"):
        if file.is_file() and file.stat().st_size:  # an experiment that has just begun has no rows
            yield file
    of_experiment = (folder / "rows.jsonl").is_file()
    for below in sorted((each for each in folder.iterdir() if each.is_dir()), key=_by_number):
        if not (of_experiment and below.name.isdecimal()):
            yield from _found(below)


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else -1, path.name)


def _read_run(file: Path) -> PlainRun | None:
    """The run, or ``None``: a resumed job had nothing left to do, and its figures were lost before."""
    try:
        value = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if isinstance(value, dict) and "decode_tokens_per_second" not in value and "num_resumed_prompts" in value:
        return None
    if not isinstance(value, dict) or "decode_tokens_per_second" not in value:
        raise ConfigError(f"{file} is no metrics.json; {_HOW}")
    try:
        typed(value, _RUN)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; it was written by another version of emssd, run again") from None
    return PlainRun(str(file.parent), value)


def read_rows(path: Path) -> list[Row | Simulation]:
    """The rows of a ``rows.jsonl``, which must have some."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # and at nothing else that Unicode calls a line's end
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found = []
    for where, line in ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            value = read_json(line)
        except ValueError:
            raise ConfigError(
                f"{where} is no JSON; if the experiment was interrupted there, resume=true goes on with it and mends it"
            ) from None
        found.append(parse(value, str(path), where))
    if not found:
        raise ConfigError(f"{path} holds no rows yet; its experiment writes one at the end of each of its runs")
    return found


def parse(row: Any, source: str = "", where: str = "row") -> Row | Simulation:
    """One row from its JSON value. Raises ConfigError, which says what it lacks, or has in another form."""
    if not isinstance(row, dict) or "experiment" not in row:
        raise ConfigError(f"{where} is no row of an experiment; python -m emssd -m experiment=NAME writes such rows")
    row = row | {"source": source}
    try:
        if "points" in row:
            typed(row, _SIMULATED)
            return typed(row, Simulation)
        typed(row, _MEASURED)
        return typed(row, Row)
    except ValueError as error:
        raise ConfigError(
            f"{where} is of another format: {error}; run the experiment again with this version of emssd"
        ) from None
