"""Plain runs, such as those of a sweep, each beside the one that drafted nothing; and where a report comes from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from textwrap import shorten
from typing import Any

from emssd.cli.console import speedup_text
from emssd_lab.report.figures import coloured, curves
from emssd_lab.report.rows import Material, PlainRun, Row, Simulation
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import Code, Table, code, escape, grouped, listed, pairs

__all__ = ["plain_runs", "provenance"]

_Metrics = Mapping[str, Any]
_SPEED = "decode_tokens_per_second"


def plain_runs(runs: Seq[PlainRun]) -> list[Section]:
    """The section of runs that are no part of an experiment, if there are any."""
    if not runs:
        return []
    section = Section(
        "runs",
        "Single runs",
        "Speed-ups are over decoding without drafts in the same run (check=plain; brackets hold two standard errors on "
        "each side), else over the run with drafter=none that is equal in all but drafter and budget. τ is the number "
        "of new tokens of a sequence in a step of the model.",
    )
    found = [run.metrics for run in runs]
    common, names = _names([str(metrics["title"]) for metrics in found])
    if common:
        section.say(f"All of {escape(common)}:")
    parts = [part for metrics in found for part in (metrics, metrics.get("greedy", {}))]
    section.warn_if_busy(*(part.get("other_cpu_share") for part in parts))
    plain = [metrics for metrics in found if metrics.get("setting", {}).get("drafter") == "none"]
    baselines = {_setting(metrics): float(metrics[_SPEED]) for metrics in reversed(plain)}
    figures = (_figures(name, run, baselines.get(_setting(run.metrics))) for name, run in zip(names, runs, strict=True))
    section.table(Table.of(figures))
    told = [metrics for metrics in found if "setting" in metrics]
    alike = grouped(told, lambda metrics: _setting(metrics, but="batch_size")).values()
    sweeps = [members for members in alike if len(members) > 1]
    if sweeps and find_spec("matplotlib") is None:  # a table alone is a report, too
        section.say('Plots need matplotlib: pip install "emssd[plots]".')
        return [section]
    made_up = (mark for mark in ("random weights", "replay") if any(mark in metrics["title"] for metrics in found))
    mark = ", ".join(made_up)
    for members in sweeps:
        _draw(section, members, mark)
    return [section]


def _names(titles: Seq[str]) -> tuple[str, list[str]]:
    """The parts that all `titles` share, and of each title the other parts; a title alone stays whole."""
    parts = [title.split(" · ") for title in titles]
    common = [part for part in parts[0] if len(parts) > 1 and all(part in others for others in parts)]
    names = [" · ".join(part for part in mine if part not in common) or "run" for mine in parts]
    return " · ".join(common), names


def _figures(name: str, run: PlainRun, base: float | None) -> dict[str, str | None]:
    metrics = run.metrics
    over_base = None if base is None else f"{metrics[_SPEED] / base:.2f}×"
    check = metrics.get("check")
    return {
        "run": name,
        "tokens/s, end to end": f"{metrics['tokens_per_second']:,.1f}",
        "tokens/s, decode": f"{metrics[_SPEED]:,.1f}",
        "speed-up, decode": speedup_text(metrics) if "speedup" in metrics else over_base,
        "τ": f"{metrics['mean_acceptance_length']:.2f}",
        "check": check and f"{check['exact']} exact, {check['ties']} ties, {check['differences']} different",
        "folder": Code(run.name),
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
    title = ", ".join(members[0]["setting"]["options"])
    svg = curves(
        shorten(title, 60, placeholder=" …"),
        "batch size / rows",
        "tokens/s of decode steps",
        coloured(lines),
        mark=mark,
    )
    section.draw(f"Tokens/s of single runs by batch size: {', '.join(lines)}", svg)


def provenance(material: Material) -> Section:
    """Commands, commits, machines, versions and dates; and what was mixed."""
    warnings = (f"**Warning**: {warning}" for warning in mixtures(material))
    section = Section("provenance", "Where this comes from", *warnings)
    seen = Counter(tuple(origin.items()) for origin in _origins(material))
    section.table(Table.of([{**dict(origin), "rows": str(count)} for origin, count in seen.items()], left=8))
    alike = grouped(
        material.runs, lambda run: "; ".join(pairs(run.metrics.get(key, {})) for key in ("versions", "hardware"))
    )
    for said, runs in alike.items():
        section.say(f"{listed(code(run.name) for run in runs)}: {escape(said)}.")
    return section


def mixtures(material: Material) -> list[str]:
    """Experiments whose rows come from several machines, commits or versions."""
    found = []
    for name, origins in grouped(_origins(material), lambda origin: origin["experiment"]).items():
        for what, column in (("machines", "machine"), ("commits", "commit"), ("versions", "versions")):
            values = dict.fromkeys(origin[column] for origin in origins)
            if len(values) > 1:
                found.append(f"rows of {escape(name)} come from several {what}: {escape(listed(values))}.")
    return found


def _origins(material: Material) -> list[dict[str, str]]:
    """Of each row: the columns of the table that says where it comes from."""
    rows: list[Row | Simulation] = [*material.rows, *material.simulations]
    found = []
    for row in rows:
        origin, hardware = row.provenance, row.provenance.hardware
        memory, rate = hardware.bytes_per_second, hardware.flops_per_second
        found.append({
            "experiment": row.experiment,
            "command": Code(origin.command),
            "machine": hardware.name,
            "rates": f"{memory / 1e9:,.3g} GB/s, {rate / 1e12:,.3g} TFLOP/s" if memory else "",
            "commit": origin.commit or "installed",
            "versions": pairs(origin.versions),
            "date": origin.date,
            "seeds": pairs(origin.seed),
        })  # fmt: skip
    return found
