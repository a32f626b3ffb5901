"""Plain runs, such as those of a sweep, each beside the one that drafted nothing and is equal else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from typing import Any

from emssd.report.figures import Curve, colour, curves
from emssd.report.sections.common import Plot, Section
from emssd.report.sources import Material, PlainRun
from emssd.report.text import code, escape

__all__ = ["plain_runs"]

_SPEED = "decode_tokens_per_second"


def plain_runs(material: Material) -> Section | None:
    """Runs that are no part of an experiment."""
    if not material.runs:
        return None
    section = Section("runs", "Single runs")
    section.say("Runs of the command line, in the order given; the paper has nothing to compare single runs with.")
    baselines = _baselines(material.runs)
    lines = []
    for run in material.runs:
        metrics, check = run.metrics, run.metrics.get("check")
        speedup = _speedup(metrics, baselines)
        lines.append(
            [
                escape(metrics["title"]),
                f"{metrics['tokens_per_second']:,.1f}",
                f"{metrics[_SPEED]:,.1f}",
                "" if speedup is None else f"{speedup:.2f}",
                f"{metrics['mean_acceptance_length']:.2f}",
                ""
                if check is None
                else f"{check['exact']} exact, {check['ties']} ties, {check['differences']} different",
                code(run.name),
            ]
        )
    section.table(
        ["run", "tokens/s, end to end", "tokens/s, decode", "speed-up, decode", "τ", "check=greedy", "folder"], lines
    )
    section.say(
        "Speed-up: against plain greedy decoding in the same run (check=greedy), else against the run with "
        "drafter=none of the same batch size, machine and other options."
    )
    titles = [run.metrics["title"] for run in material.runs]
    marks = [mark for mark in ("random weights", "replay") if any(mark in title for title in titles)]
    section.say(f"**{', '.join(marks)}**: where a title says so, the model or the drafts are made up." if marks else "")
    if groups := _groups(material.runs):
        if find_spec("matplotlib") is None:  # a table alone is a report, too
            section.say('Plots need matplotlib: pip install "emssd[plots]".')
        else:
            plots = [_plot(f"runs_{number}", members, ", ".join(marks)) for number, members in enumerate(groups, 1)]
            section.plots(plots, "Tokens/s of decode steps; single runs, without a spread.")
    return section


def _setting(metrics: Mapping[str, Any], *, but: str = "") -> str | None:
    """What must be equal for runs to be compared; ``None`` of runs that do not tell."""
    if (setting := metrics.get("setting")) is None:
        return None
    apart = {"drafter", "budget", but}
    return json.dumps([{k: v for k, v in setting.items() if k not in apart}, metrics["hardware"]], sort_keys=True)


def _baselines(runs: Seq[PlainRun]) -> dict[str | None, float]:
    """By setting the speed of the run that drafted nothing; of several, the first."""
    plain = [run.metrics for run in runs if run.metrics.get("setting", {}).get("drafter") == "none"]
    return {_setting(metrics): metrics[_SPEED] for metrics in reversed(plain)}


def _speedup(metrics: Mapping[str, Any], baselines: Mapping[str | None, float]) -> float | None:
    if "speedup" in metrics:
        return float(metrics["speedup"])
    plain = baselines.get(_setting(metrics))
    return metrics[_SPEED] / plain if plain else None


def _groups(runs: Seq[PlainRun]) -> list[list[Mapping[str, Any]]]:
    """Of each setting with more than one run, their metrics."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if (setting := _setting(run.metrics, but="batch_size")) is not None:
            groups.setdefault(setting, []).append(run.metrics)
    return [members for members in groups.values() if len(members) > 1]


def _plot(name: str, members: Seq[Mapping[str, Any]], mark: str) -> Plot:
    """Speed by batch size; a line for each drafter and budget."""
    lines: dict[str, dict[float, float]] = {}
    for metrics in members:
        setting = metrics["setting"]
        label = "none" if setting["drafter"] == "none" else f"{setting['drafter']} {setting['budget']}"
        lines.setdefault(label, {})[setting["batch_size"]] = metrics[_SPEED]
    drawn = [Curve(label, points, colour(None, index)) for index, (label, points) in enumerate(lines.items())]
    title = ", ".join(members[0]["setting"]["options"])
    svg = curves(title[:60], "batch size / rows", "tokens/s of decode steps", drawn, mark=mark)
    return Plot(name, f"tokens per second by batch size of {', '.join(lines)}", svg)
