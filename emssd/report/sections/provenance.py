"""Where everything in a report comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from emssd.report.rows import Row, Simulation, machine_name
from emssd.report.sections.common import Section
from emssd.report.sources import Material
from emssd.report.tables import Code, Table, code, escape, grouped, listed, pairs

__all__ = ["mixtures", "provenance"]


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
