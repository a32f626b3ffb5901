"""Plain runs, such as those of a sweep, each beside the one that drafted nothing; and where a report comes from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from typing import Any

from emssd.report.figures import coloured, curves
from emssd.report.rows import Row, Simulation, machine_name
from emssd.report.sections.common import Section
from emssd.report.sources import Material, PlainRun
from emssd.report.tables import Code, Table, code, escape, grouped, listed, pairs, table_of

__all__ = ["mixtures", "plain_runs", "provenance"]

_Metrics = Mapping[str, Any]
_SPEED = "decode_tokens_per_second"


def plain_runs(material: Material) -> Section | None:
    """Runs that are no part of an experiment."""
    if not material.runs:
        return None
    section = Section("runs", "Single runs")
    section.say(
        "Speed-ups are against plain greedy decoding in the same run (check=greedy), else against the run with "
        "drafter=none that is equal in all but drafter and budget. A title says where a model or drafts are made up."
    )
    section.warn_if_busy(
        *(metrics for run in material.runs for metrics in (run.metrics, run.metrics.get("greedy", {})))
    )
    plain = [run.metrics for run in material.runs if run.metrics.get("setting", {}).get("drafter") == "none"]
    baselines = {_setting(metrics): float(metrics[_SPEED]) for metrics in reversed(plain)}

    def speedup(run: PlainRun) -> str:
        base = baselines.get(_setting(run.metrics))
        ratio = run.metrics.get("speedup", run.metrics[_SPEED] / base if base else None)
        return "" if ratio is None else f"{ratio:.2f}"

    def check(run: PlainRun) -> str:
        found = run.metrics.get("check")
        return f"{found['exact']} exact, {found['ties']} ties, {found['differences']} different" if found else ""

    columns: dict[str, Callable[[PlainRun], str]] = {
        "run": lambda run: str(run.metrics["title"]),
        "tokens/s, end to end": lambda run: f"{run.metrics['tokens_per_second']:,.1f}",
        "tokens/s, decode": lambda run: f"{run.metrics[_SPEED]:,.1f}",
        "speed-up, decode": speedup,
        "τ": lambda run: f"{run.metrics['mean_acceptance_length']:.2f}",
        "check=greedy": check,
        "folder": lambda run: Code(run.name),
    }
    section.table(table_of(material.runs, columns))
    if defined := [run.metrics for run in material.runs if run.metrics.get("acceptance", {}).get("vllm")]:
        section.say("Acceptance as others define it, by place in the draft; docs/metrics.md says how they differ:")
        section.table(table_of(defined, _DEFINITIONS))
    titles = [run.metrics["title"] for run in material.runs]
    mark = ", ".join(mark for mark in ("random weights", "replay") if any(mark in title for title in titles))
    told = [run.metrics for run in material.runs if "setting" in run.metrics]
    sweeps = [
        members
        for members in grouped(told, lambda metrics: _setting(metrics, but="batch_size")).values()
        if len(members) > 1
    ]
    if sweeps and find_spec("matplotlib") is None:  # a table alone is a report, too
        section.say('Plots need matplotlib: pip install "emssd[plots]".')
    elif sweeps:
        for members in sweeps:
            _draw(section, members, mark)
    return section


def _shares(who: str, name: str) -> Callable[[_Metrics], str]:
    return lambda metrics: " ".join(f"{share:.2f}" for share in metrics["acceptance"][who][name])


_DEFINITIONS: dict[str, Callable[[_Metrics], str]] = {
    "run": lambda metrics: str(metrics["title"]),
    "vLLM, speculators: length": lambda metrics: f"{metrics['acceptance']['vllm']['mean_acceptance_length']:.2f}",
    "SpecForge: accept_length": lambda metrics: f"{metrics['acceptance']['specforge']['accept_length']:.2f}",
    "vLLM: per position": _shares("vllm", "per_position"),
    "speculators: cond_acc": _shares("speculators", "cond_acc"),
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
    svg = curves(title[:60], "batch size / rows", "tokens/s of decode steps", coloured(lines), mark=mark)
    section.draw(f"Tokens/s of single runs by batch size: {', '.join(lines)}", svg)


def provenance(material: Material) -> Section:
    """Commands, commits, machines, versions and dates; and what was mixed."""
    section = Section("provenance", "Where this comes from")
    for warning in mixtures(material):
        section.say(f"**Warning**: {warning}")
    seen = Counter((row.experiment, *_origin(row.provenance)) for row in _all(material))
    columns = ["experiment", "command", "machine", "rates", "commit", "versions", "date", "seeds", "rows"]
    lines = [[name, Code(command), *rest, str(count)] for (name, command, *rest), count in seen.items()]
    section.table(Table(columns, lines, left=8))
    alike = grouped(
        material.runs, lambda run: "; ".join(pairs(run.metrics.get(key, {})) for key in ("versions", "hardware"))
    )
    for said, runs in alike.items():
        section.say(f"{listed(code(run.name) for run in runs)}: {escape(said)}.")
    return section


def mixtures(material: Material) -> list[str]:
    """Experiments whose rows come from several machines, commits or versions."""
    found = []
    for name, rows in grouped(_all(material), lambda row: row.experiment).items():
        origins = [_origin(row.provenance) for row in rows]
        for what, place in (("machines", 1), ("commits", 3), ("versions", 4)):
            values = dict.fromkeys(origin[place] for origin in origins)
            if len(values) > 1:
                found.append(f"rows of {escape(name)} come from several {what}: {escape(listed(values))}.")
    return found


def _all(material: Material) -> list[Row | Simulation]:
    return [*material.rows, *material.simulations]


def _origin(each: Mapping[str, Any]) -> tuple[str, ...]:
    """Command, machine, rates, commit, versions, date and seeds."""
    hardware = each["hardware"]
    rates = ""
    if "bytes_per_second" in hardware:
        rates = f"{hardware['bytes_per_second'] / 1e9:,.3g} GB/s, {hardware['flops_per_second'] / 1e12:,.3g} TFLOP/s"
    versions, seeds = pairs(each["versions"]), pairs(each.get("seed", {}))
    return each["command"], machine_name(hardware), rates, each["commit"] or "installed", versions, each["date"], seeds
