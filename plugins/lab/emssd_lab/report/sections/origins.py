"""Single runs, such as those of a sweep, each beside the one that drafted nothing; and where a report comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from textwrap import shorten
from typing import Any

import pandas as pd

from emssd.cli.console import speedup_text
from emssd.data.typed import read_json
from emssd_lab.report.figures import coloured, curves
from emssd_lab.report.rows import Material, Row, Simulation
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import Code, Table, code, escape, listed, pairs

__all__ = ["failed_runs", "mixtures", "plain_runs", "provenance"]

_Metrics = Mapping[str, Any]
_SPEED = "decode_tokens_per_second"


def plain_runs(runs: Mapping[str, _Metrics], title: str = "", claim: str = "") -> Section:
    """The section of runs that are no part of an experiment."""
    section = Section("runs", title, claim)
    metrics = list(runs.values())
    titles = [str(run["title"]).split(" · ") for run in metrics]
    common = [part for part in titles[0] if len(runs) > 1 and all(part in title for title in titles)]
    names = [" · ".join(part for part in title if part not in common) or "run" for title in titles]
    if common:
        section.say(f"All of {escape(' · '.join(common))}:")
    parts = [part for run in metrics for part in (run, run.get("greedy", {}))]
    section.warn_if_busy(*(part.get("other_cpu_share") for part in parts))
    plain = [run for run in metrics if run.get("setting", {}).get("drafter") == "none"]
    baselines = {_setting(run): float(run[_SPEED]) for run in reversed(plain)}
    figures = (_figures(name, run, baselines.get(_setting(run))) for name, run in zip(names, metrics, strict=True))
    section.table(Table.of(line | {"folder": Code(folder)} for line, folder in zip(figures, runs, strict=True)))
    sweeps: dict[str | None, list[_Metrics]] = {}
    for run in metrics:
        if "setting" in run:
            sweeps.setdefault(_setting(run, but="batch_size"), []).append(run)
    made_up = (mark for mark in ("random weights", "replay") if any(mark in run["title"] for run in metrics))
    mark = ", ".join(made_up)
    for members in sweeps.values():
        if len(members) > 1:
            _draw(section, members, mark)
    return section


def _figures(name: str, metrics: _Metrics, base: float | None) -> dict[str, str | None]:
    over_base = None if base is None else f"{metrics[_SPEED] / base:.2f}×"
    check = metrics.get("check")
    return {
        "run": name,
        "tokens/s, end to end": f"{metrics['tokens_per_second']:,.1f}",
        "tokens/s, decode": f"{metrics[_SPEED]:,.1f}",
        "speed-up, decode": speedup_text(metrics) if "speedup" in metrics else over_base,
        "τ": f"{metrics['mean_acceptance_length']:.2f}",
        "check": check and f"{check['exact']} exact, {check['ties']} ties, {check['differences']} different",
    }


def _setting(metrics: _Metrics, *, but: str = "") -> str | None:
    """A key that is equal for comparable runs; ``None`` for runs without a setting."""
    if (setting := metrics.get("setting")) is None:
        return None
    apart = {"drafter", "budget", but}
    return json.dumps([{k: v for k, v in setting.items() if k not in apart}, metrics["hardware"]], sort_keys=True)


def _draw(section: Section, members: Seq[_Metrics], mark: str) -> None:
    """Speed by batch size; a line for each drafter and budget."""
    lines: dict[str, dict[float, float]] = {}
    for metrics in members:
        setting = metrics["setting"]
        label = "none" if setting["drafter"] == "none" else f"{setting['drafter']} {setting['budget']}"
        lines.setdefault(label, {})[setting["batch_size"]] = metrics[_SPEED]
    title = shorten(", ".join(members[0]["setting"]["options"]), 60, placeholder=" …")
    svg = curves(title, "batch size / rows", "tokens/s of decode steps", coloured(lines), mark=mark)
    section.draw(f"Tokens/s of single runs by batch size: {', '.join(lines)}", svg)


def failed_runs(paths: Iterable[Path]) -> list[Section]:
    """A section of the ``failed.jsonl`` of sweeps, with each failed run's options and its reason, if there are some."""
    files = [file for path in paths if path.is_dir() for file in sorted(path.rglob("failed.jsonl"))]
    runs = [read_json(line) for file in files for line in file.read_bytes().splitlines()]
    lines = [f"- {code(' '.join(run['overrides']))}: {escape(run['error'])}" for run in runs]
    return [Section("failed", "Runs that failed", "\n".join(lines))] if lines else []


def provenance(material: Material, title: str) -> Section:
    """The section of commands, commits, machines, versions and dates, with a warning of what was mixed."""
    warnings = [f"**Warning**: {warning}" for warning in mixtures(material)]
    section = Section("provenance", title, *warnings)
    origins = _origins(material)
    if len(origins):
        counts = origins.groupby([*origins], sort=False).size().reset_index(name="rows")
        section.table(Table.of(counts.assign(command=counts.command.map(Code), rows=counts["rows"].map(str)), left=8))
    alike: dict[str, list[str]] = {}
    for folder, metrics in material.runs.items():
        text = "; ".join(pairs(metrics.get(key, {})) for key in ("versions", "hardware"))
        alike.setdefault(text, []).append(code(folder))
    for text, names in alike.items():
        section.say(f"{listed(names)}: {escape(text)}.")
    return section


def mixtures(material: Material) -> list[str]:
    """Experiments whose rows come from several machines, commits or versions."""
    columns = {"machines": "machine", "commits": "commit", "versions": "versions"}
    origins = _origins(material)
    return [
        f"rows of {escape(name)} come from several {plural}: {escape(listed(mine[column].unique()))}."
        for name, mine in (origins.groupby("experiment", sort=False) if len(origins) else ())
        for plural, column in columns.items()
        if mine[column].nunique() > 1
    ]


def _origins(material: Material) -> pd.DataFrame:
    """For each row, the columns of the table of origins."""
    lines = []
    rows: list[Row | Simulation] = [*material.rows, *material.simulations]
    for row in rows:
        origin, hardware = row.provenance, row.provenance.hardware
        memory, rate = hardware.bytes_per_second, hardware.flops_per_second
        lines.append({
            "experiment": row.experiment,
            "command": origin.command,
            "machine": hardware.name,
            "rates": f"{memory / 1e9:,.3g} GB/s, {rate / 1e12:,.3g} TFLOP/s" if memory else "",
            "commit": origin.commit or "installed",
            "versions": pairs(origin.versions),
            "date": origin.date,
            "seeds": pairs(origin.seed),
        })  # fmt: skip
    return pd.DataFrame(lines)
