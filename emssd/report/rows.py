"""Rows of experiments, checked, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from emssd.data.typed import read_json, typed
from emssd.errors import ConfigError

__all__ = ["Row", "Simulation", "machine_name", "parse", "per", "read_rows"]

_PROVENANCE = ("command", "commit", "date", "versions")
_HARDWARE = ("processor", "threads", "device")
_METRICS = (
    "decode_tokens_per_second", "mean_acceptance_length", "acceptance_histogram", "draft_length_histogram",
    "padding_per_new_token", "padding_ratio", "input_padding_tokens", "kv_padding_slots", "num_new_tokens",
    "decode_steps", "decode_row_steps", "decode_new_tokens", "decode_computed_tokens", "decode_kv_tokens",
    "decode_seconds", "median_decode_step_seconds",
)  # fmt: skip
_COSTS = ("weight_bytes", "kv_bytes_per_token", "matmul_parameters", "attention_flops_per_kv_token")


def _with(*names: str, **groups: Any) -> type[msgspec.Struct]:
    """An object with these fields of any kind, and these groups of fields."""
    return msgspec.defstruct("Needed", [*names, *groups.items()])


_MEASURED = _with(
    metrics=_with(*_METRICS),
    samples=_with("acceptance_length", "num_prompt_tokens", "num_new_tokens"),
    costs=_with(*_COSTS),
    provenance=_with(*_PROVENANCE, hardware=_with(*_HARDWARE, "bytes_per_second", "flops_per_second")),
)
_SIMULATED = _with(
    points=list[_with("p", "batch_size", "exact", "simulated")],  # type: ignore[misc]  # made here
    provenance=_with(*_PROVENANCE, hardware=_with(*_HARDWARE)),
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
    """The rows of a ``rows.jsonl``. Raises ConfigError: it cannot be read, is empty, or holds something else."""
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

    Raises:
        ConfigError: it lacks something, or has it in another form; the message says what.
    """
    if not isinstance(row, dict) or "experiment" not in row:
        raise ConfigError(f"{where} is no row of an experiment; python -m emssd -m experiment=NAME writes such rows")
    try:
        row = row | {"source": source}
        if "points" in row:
            typed(row, _SIMULATED)
            return typed(row, Simulation)
        typed(row, _MEASURED)
        return typed(row, Row)
    except ValueError as error:
        raise ConfigError(
            f"{where} is of another format: {error}; run the experiment again with this version of emssd"
        ) from None


def _parsed_line(line: str, where: str) -> Any:
    try:
        return read_json(line)
    except ValueError:
        raise ConfigError(
            f"{where} is no JSON; if the experiment was interrupted there, resume=true goes on with it and mends it"
        ) from None
