"""What a report is made of: rows of experiments, checked, as values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emssd.errors import ConfigError

__all__ = ["Row", "Simulation", "machine_name", "parse", "per", "read_rows"]

_ORIGIN = {
    "provenance": ("command", "commit", "date", "versions", "hardware"),
    "provenance.hardware": ("processor", "threads", "device"),
}
_NEEDED = _ORIGIN | {
    "metrics": (
        "decode_tokens_per_second", "mean_acceptance_length", "acceptance_histogram", "draft_length_histogram",
        "padding_per_new_token", "padding_ratio", "input_padding_tokens", "kv_padding_slots", "num_new_tokens",
        "decode_steps", "decode_row_steps", "decode_new_tokens", "decode_computed_tokens", "decode_kv_tokens",
        "decode_seconds", "median_decode_step_seconds",
    ),
    "samples": ("acceptance_length", "num_prompt_tokens", "num_new_tokens"),
    "costs": ("weight_bytes", "kv_bytes_per_token", "matmul_parameters", "attention_flops_per_kv_token"),
    "provenance.hardware": ("processor", "threads", "device", "bytes_per_second", "flops_per_second"),
}  # fmt: skip
_TYPES = {"str": str, "str | None": (str, type(None)), "int": int, "bool": bool, "tuple[str, ...]": list}


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
    drafter: str
    drafter_options: str
    backend: str
    backend_options: str
    budget: str
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
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    compiled: bool = False

    @property
    def rate(self) -> float:
        """Tokens/s of decode steps."""
        return float(self.metrics["decode_tokens_per_second"])


@dataclass(frozen=True, slots=True)
class Simulation:
    """The paper's numerical simulation (Appendix B): expected values by p and batch size.

    Attributes:
        points: each with ``p``, ``batch_size``, ``exact`` and ``simulated``, as `emssd.simulate` makes them.
        max_acceptance: the longest τ.
    """

    source: str
    experiment: str
    points: Seq[Mapping[str, Any]]
    max_acceptance: int
    provenance: Mapping[str, Any]


def machine_name(hardware: Mapping[str, Any]) -> str:
    """The processor, or the GPU with the processor behind it."""
    device = str(hardware["device"])
    processor = f"{hardware['processor']}, {hardware['threads']} threads"
    return processor if device == "cpu" else f"{device} ({processor})"


def per(total: str, number: str) -> Callable[[Row], float]:
    """A metric that adds up ÷ one that counts, as a function of a row; 0 where nothing was counted."""
    return lambda row: float(row.metrics[total]) / max(row.metrics[number], 1)


def read_rows(path: Path) -> list[Row | Simulation]:
    """The rows of a ``rows.jsonl``.

    Raises:
        ConfigError: it cannot be read, is empty, or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # and at nothing else that Unicode calls a line's end
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    rows = [(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path} holds no rows yet; its experiment writes one at the end of each of its runs")
    return [parse(_parsed_line(line, where), str(path), where) for line, where in rows]


def parse(row: Any, source: str = "", where: str = "row") -> Row | Simulation:
    """One row from its JSON value.

    Args:
        row: as the experiment wrote it.
        source: the file of it.
        where: what errors call it.

    Raises:
        ConfigError: it lacks something, or has it in another form; the message says what.
    """
    if not isinstance(row, dict) or "experiment" not in row:
        raise ConfigError(f"{where} is no row of an experiment; python -m emssd -m experiment=NAME writes such rows")
    if "points" in row:
        _need(row, _ORIGIN, where)
        for point in row["points"]:
            _need({"points": point}, {"points": ("p", "batch_size", "exact", "simulated")}, where)
        kind: type[Row] | type[Simulation] = Simulation
    else:
        _need(row, _NEEDED, where)
        kind = Row
    values: dict[str, Any] = {"source": source}
    for field in dataclasses.fields(kind)[1:]:
        if field.name not in row:
            if field.default is dataclasses.MISSING:
                raise _other_format(where, field.name)
            continue
        value = values[field.name] = row[field.name]
        wanted = _TYPES.get(str(field.type), list if field.name == "points" else Mapping)
        if not isinstance(value, wanted) or (field.type == "int" and isinstance(value, bool)):  # type: ignore[arg-type]  # a class or a tuple of classes
            raise ConfigError(f"{where}: {field.name} is {value!r}, and should be {field.type}")
    return kind(**values | {name: tuple(values[name]) for name in ("overrides", "options") if name in values})


def _parsed_line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise ConfigError(
            f"{where} is no JSON; if the experiment was interrupted there, resume=true goes on with it and mends it"
        ) from None


def _need(row: Mapping[str, Any], groups: Mapping[str, Seq[str]], where: str) -> None:
    """Refuse a row without these names in these groups."""
    for path, names in groups.items():
        group: Any = row
        for part in path.split("."):
            group = group.get(part)
            if not isinstance(group, Mapping):
                raise ConfigError(
                    f"{where} ({path}) is missing or no JSON object; these are rows of another format, make them again"
                )
        for name in names:
            if name not in group:
                raise _other_format(f"{where} ({path})", name)


def _other_format(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{where} has no {name!r}, so it is of another format; run the experiment again with this version of emssd"
    )
