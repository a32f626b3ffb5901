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

PHASES = ("schedule", "draft", "plan", "forward", "verify", "other")
GREEDY = ("greedy", "ragged_greedy")


def value(experiment: str = "fig1", method: str | None = "vanilla", **changes: Any) -> dict[str, Any]:
    """A row as JSON has it; `changes` replace its fields, those of metrics given as ``metrics_NAME``."""
    speculate = method not in GREEDY
    size = changes.get("batch_size", 2)
    tau = 2.0 if speculate else 1.0
    metrics = {
        "decode_tokens_per_second": 100.0,
        "mean_acceptance_length": tau,
        "acceptance_histogram": {"1": 10, "3": 10} if speculate else {"1": 20},
        "draft_length_histogram": {"0": 4, "4": 16} if speculate else {"0": 20},
        "padding_per_new_token": 0.5 if method == "vanilla" else 0.0,
        "padding_ratio": 0.25,
        "input_padding_tokens": 6 if method in ("vanilla", "unpad_kv") else 0,
        "kv_padding_slots": 12 if method in ("vanilla", "unpad_inputs") else 0,
        "num_new_tokens": 40,
        "decode_steps": 10,
        "decode_row_steps": 10 * size,
        "decode_new_tokens": int(tau * 10 * size),
        "decode_computed_tokens": 10 * size * (4 if speculate else 1),
        "decode_kv_tokens": 10 * size * 100,
        "decode_seconds": dict.fromkeys(PHASES, 0.01),
        "median_decode_step_seconds": 0.006,
    }
    backend = "ragged" if method and method.startswith("ragged") else "padded"
    hardware = {"processor": "made up | for tests", "cores": 2, "threads": 2, "device": "cpu"}
    row = {
        "experiment": experiment, "size": "small", "job": 0, "repeat": 1,
        "overrides": ["model=demo", f"experiment={experiment}", "repeat=1", f"batch_size={size}", "drafter=llma"],
        "method": method, "speculate": speculate, "batch_size": size, "batching": "static", "max_new_tokens": 64,
        "model": "demo", "random_weights": False, "dtype": "float32", "compiled": False, "options": [],
        "drafter": "llma", "drafter_options": "llma", "replay": None,
        "backend": backend, "backend_options": backend, "budget": "fixed", "budget_options": "fixed",
        "data": "demo", "data_label": "demo",
        "metrics": metrics,
        "samples": {
            "acceptance_length": [1.5, 2.5, 2.0, 3.0, 1.0, 2.0],
            "num_prompt_tokens": [50, 60, 70, 80, 90, 100],
            "num_new_tokens": [64, 64, 64, 64, 30, 64],
        },
        "costs": {
            "weight_bytes": 4_000_000, "kv_bytes_per_token": 2_000, "matmul_parameters": 1_000_000,
            "attention_flops_per_kv_token": 500,
        },
        "provenance": {
            "command": f"python -m emssd -m experiment={experiment}", "commit": "abc1234", "date": "2026-11-21",
            "versions": {"emssd": "0.1.0", "torch": "2.13.0"},
            "hardware": hardware | {"bytes_per_second": 1e10, "flops_per_second": 1e11}, "seed": {"data": 0},
        },
    }  # fmt: skip
    for name, new in changes.items():
        if name.startswith("metrics_"):
            metrics[name.removeprefix("metrics_")] = new
        else:
            assert name in row, name
            row[name] = new
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
            for place, method in enumerate(methods):
                rate = 100.0 * size**0.5 * (1 + 0.3 * place) * (1 + 0.01 * repeat * (-1) ** place)
                yield value(
                    experiment, method, repeat=repeat, batch_size=size, metrics_decode_tokens_per_second=rate, **changes
                )


def simulation() -> dict[str, Any]:
    """Rows of the appendix, as `emssd_lab.simulate` has them."""
    from emssd_lab.simulate.appendix import appendix_points

    return {
        "experiment": "appendix",
        "size": "toy",
        "job": 0,
        "repeat": 1,
        "max_acceptance": 8,
        "points": appendix_points([0.5, 0.9], [1, 2, 16], num_steps=20),
        "provenance": value()["provenance"],
    }


def section_of(rows: Iterable[dict[str, Any]], name: str) -> Any:
    """The section `name` of a report on these rows; None where it has none."""
    parsed = [each for row in rows if isinstance(each := parse(row, "rows.jsonl"), Row)]
    return next((section for section in sections(Material(parsed, [], [])) if section.name == name), None)


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
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


def write_run(folder: Path, title: str = "demo", **more: Any) -> None:
    """``metrics.json`` of a run in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"title": title, "tokens_per_second": 10.0, "decode_tokens_per_second": 12.0, "num_new_tokens": 5}
    (folder / "metrics.json").write_text(json.dumps(figures | {"mean_acceptance_length": 1.5} | more))


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all kinds of rows, a plain run, and a checked run."""
    folder = tmp_path_factory.mktemp("everything")
    pairs = ("greedy", "vanilla", "unpad_both")
    shape = {"replay": "acceptance drawn: p = 0.75", "random_weights": True, "model": "opt-6.7b"}
    write(folder / "fig1", measured("fig1", (*pairs, "ragged_greedy", "ragged"), **shape))
    write(folder / "ablation", measured("ablation", ("greedy", "vanilla", "unpad_kv", "unpad_inputs", "unpad_both")))
    write(folder / "llma_models", measured("llma_models", pairs))
    write(folder / "draft_models", measured("draft_models", pairs, drafter="draft_model", model="opt-13b"))
    data = [each for name in ("gsm8k", "mt_bench") for each in measured("datasets", pairs, data_label=name)]
    write(folder / "datasets", data)
    write(folder / "padding_ratio", measured("padding_ratio", ("vanilla",)))
    write(folder / "acceptance", [value("acceptance", "ragged"), value("acceptance", "ragged", model="other")])
    write(folder / "step_time", _step_times())
    write(folder / "appendix", [simulation()])
    write(folder / "crossover", _crossover())
    write(folder / "drafters", [value("drafters", None, drafter=name, drafter_options=name, speculate=name != "none")
                                for name in ("none", "llma", "pld")])  # fmt: skip
    write(folder / "own", measured("my own", pairs))
    write_run(folder / "runs" / "0")
    write_run(folder / "runs" / "1", check={"exact": 4, "ties": 1, "differences": 0}, speedup=1.25)
    return folder


def _step_times() -> Iterator[dict[str, Any]]:
    for repeat in (1, 2, 3):
        for size in (4, 16):
            for tokens in (1, 3, 5):
                yield value(
                    "step_time", None, repeat=repeat, batch_size=size, drafter="replay", replay="p = 0",
                    drafter_options=f"replay(num_speculative_tokens={tokens - 1})",
                    metrics_decode_computed_tokens=9 * size * tokens,
                    metrics_draft_length_histogram={"0": 4, str(tokens - 1): 20},
                    metrics_mean_acceptance_length=1.0, metrics_acceptance_histogram={"1": 24},
                    metrics_median_decode_step_seconds=0.001 * (size + tokens + 0.1 * repeat),
                )  # fmt: skip


def _crossover() -> Iterator[dict[str, Any]]:
    for each in measured("crossover", (None,)):
        rate = each["metrics"]["decode_tokens_per_second"]
        for speculate, budget, factor in ((False, "fixed", 1.0), (True, "fixed", 2.5), (True, "adaptive", 2.0)):
            gain = factor / each["batch_size"] ** 0.3 if speculate else 1.0
            metrics = each["metrics"] | {"decode_tokens_per_second": rate * gain}
            yield each | {"speculate": speculate, "budget": budget, "budget_options": budget, "metrics": metrics}
