"""Where everything in a report comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emssd.report.rows import Row, Simulation, machine_name
from emssd.report.sections.common import Section
from emssd.report.sources import Material
from emssd.report.text import code, escape, listed

__all__ = ["mixtures", "provenance"]


def provenance(material: Material) -> Section:
    """Commands, commits, machines, versions and dates; and what was mixed."""
    section = Section("provenance", "Where this comes from")
    section.points(f"**Warning**: {warning}" for warning in mixtures(material))
    seen: dict[tuple[str, ...], int] = {}
    for name, each, seeds in _origins(material):
        hardware = each["hardware"]
        rates = ""
        if "bytes_per_second" in hardware:
            rates = (
                f"{hardware['bytes_per_second'] / 1e9:,.3g} GB/s, {hardware['flops_per_second'] / 1e12:,.3g} TFLOP/s"
            )
        key = (
            escape(name),
            code(each["command"]),
            escape(machine_name(hardware)),
            rates,
            escape(each["commit"] or "installed"),
            escape(", ".join(f"{package} {version}" for package, version in each["versions"].items())),
            escape(each["date"]),
            escape(seeds),
        )
        seen[key] = seen.get(key, 0) + 1
    if seen:
        section.table(
            ["experiment", "command", "machine", "rates", "commit", "versions", "date", "seeds", "rows"],
            ([*key, str(count)] for key, count in seen.items()),
            left=8,
        )
    alike: dict[str, list[str]] = {}
    for run in material.runs:
        versions = ", ".join(f"{k} {v}" for k, v in run.metrics.get("versions", {}).items())
        hardware = ", ".join(f"{k} {v}" for k, v in run.metrics.get("hardware", {}).items())
        alike.setdefault(f"{escape(versions)}; {escape(hardware)}", []).append(code(run.name))
    for said, names in alike.items():
        section.say(f"{listed(names)}: {said}.")
    for peers in material.peers:
        section.say(f"{code(peers.name)}: see its section.")
    section.say(
        "Formulas are in the project's docs/metrics.md and docs/reports.md. Ratios are of runs of one repeat, and "
        "their medians are shown with the least and the greatest; those of other engines are of the medians of one "
        "run. Every sentence with a figure was made from the rows."
    )
    return section


def mixtures(material: Material) -> list[str]:
    """Experiments whose rows come from several machines, commits or versions."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for name, each, _ in _origins(material):
        by_name.setdefault(name, []).append(each)
    found = []
    for name, members in by_name.items():
        machines = dict.fromkeys(machine_name(each["hardware"]) for each in members)
        commits = dict.fromkeys(each["commit"] or "installed" for each in members)
        versions = dict.fromkeys(", ".join(f"{k} {v}" for k, v in each["versions"].items()) for each in members)
        for what, values in (("machines", machines), ("commits", commits), ("versions", versions)):
            if len(values) > 1:
                found.append(f"rows of {escape(name)} come from several {what}: {escape(listed(values))}.")
    return found


def _origins(material: Material) -> list[tuple[str, Mapping[str, Any], str]]:
    rows: list[Row | Simulation] = [*material.rows, *material.simulations]
    return [
        (row.experiment, row.provenance, ", ".join(f"{k} {v}" for k, v in row.provenance.get("seed", {}).items()))
        for row in rows
    ]
