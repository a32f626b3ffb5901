"""Made-up rows, for tests only: the figures in them were measured nowhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emssd_lab.report import figures
from emssd_lab.report.rows import Material, Row, parse
from emssd_lab.report.sections import sections
from emssd_lab.report.tables import Table

GREEDY = ("greedy", "ragged_greedy")
ROW = (Path(__file__).parent / "row.json").read_text(encoding="utf-8")


def value(experiment: str = "fig1", method: str | None = "vanilla", **changes: Any) -> dict[str, Any]:
    """A row as JSON has it; `changes` replace its fields, those of metrics given as ``metrics_NAME``."""
    row = json.loads(ROW)
    speculate, size = method not in GREEDY, changes.get("batch_size", 2)
    tau = 2 if speculate else 1
    metrics = row["metrics"] | {
        "mean_acceptance_length": float(tau),
        "padding_per_new_token": 0.5 if method == "vanilla" else 0.0,
        "input_padding_tokens": 6 if method in ("vanilla", "unpad_kv") else 0,
        "kv_padding_slots": 12 if method in ("vanilla", "unpad_inputs") else 0,
        "decode_row_steps": 10 * size,
        "decode_new_tokens": tau * 10 * size,
        "decode_computed_tokens": 10 * size * (4 if speculate else 1),
        "decode_kv_tokens": 10 * size * 100,
    }
    if not speculate:
        metrics |= {"acceptance_histogram": {"1": 20}, "draft_length_histogram": {"0": 20}}
    backend = "ragged" if method and method.startswith("ragged") else "padded"
    row |= {
        "experiment": experiment, "method": method, "speculate": speculate, "batch_size": size, "backend": backend,
        "backend_options": backend, "metrics": metrics,
    }  # fmt: skip
    for name, new in changes.items():
        owner, field = (metrics, name.removeprefix("metrics_")) if name.startswith("metrics_") else (row, name)
        assert field in owner or owner is metrics, name
        owner[field] = new
    return row


def row(*arguments: Any, **changes: Any) -> Row:
    """The same as a `Row`."""
    made = parse(value(*arguments, **changes), "rows.jsonl")
    assert isinstance(made, Row)
    return made


def measured(experiment: str, methods: Iterable[str | None], **changes: Any) -> Iterator[dict[str, Any]]:
    """Rows of `methods` at three batch sizes, three repeats each; tokens/s follow from their place alone."""
    for repeat in (1, 2, 3):
        for size in (2, 8, 16):
            for i, method in enumerate(methods):
                rate = 100.0 * size**0.5 * (1 + 0.3 * i) * (1 + 0.01 * repeat * (-1) ** i)
                yield value(
                    experiment, method, repeat=repeat, batch_size=size, metrics_decode_tokens_per_second=rate, **changes
                )


def section_of(rows: Iterable[dict[str, Any]], name: str) -> Any:
    """The section `name` of a report on these rows; None where it has none."""
    parsed = [made for row in rows if isinstance(made := parse(row, "rows.jsonl"), Row)]
    return next((section for section in sections(Material(parsed, [], {})) if section.name == name), None)


def tables_of(rows: Iterable[dict[str, Any]], name: str) -> list[Table]:
    """The tables of that section."""
    return [block for block in section_of(rows, name).blocks if isinstance(block, Table)]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are empty; each would take a quarter of a second."""
    monkeypatch.setattr(figures, "_svg", lambda *_, **__: "")


def write(folder: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """``rows.jsonl`` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_run(folder: Path, title: str = "demo", **more: Any) -> None:
    """``metrics.json`` of a run in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {"title": title, "tokens_per_second": 10.0, "decode_tokens_per_second": 12.0, "num_new_tokens": 5}
    (folder / "metrics.json").write_text(json.dumps(metrics | {"mean_acceptance_length": 1.5} | more))
