"""The sections of a report. ``sections.toml`` has their titles and first paragraphs, in the order of the page."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emssd_lab.report.cells import WITHOUT_BASELINE, frame
from emssd_lab.report.rows import Material, Row
from emssd_lab.report.sections import acceptance, drafts, methods, origins, steps
from emssd_lab.report.sections.common import Plot, Section
from emssd_lab.report.tables import code, escape, listed

__all__ = ["Plot", "Section", "sections"]

_WRITERS: dict[str, Callable[[Section, Any], None]] = {  # the others compare methods
    "padding_ratio": acceptance.padding_ratio,
    "acceptance": acceptance.acceptance,
    "step_time": steps.step_time,
    "appendix": acceptance.appendix,
    "crossover": methods.crossover,
    "never_slower": methods.never_slower,
    "drafters": drafts.drafters,
    "trees": drafts.drafters,
    "time": steps.time_of_steps,
}


def sections(material: Material) -> list[Section]:
    """All sections that `material` has rows for; the last one says where all of it comes from."""
    texts = tomllib.loads(Path(__file__).with_name("sections.toml").read_text(encoding="utf-8"))
    about, rows = texts["experiments"], material.rows
    parts: list[tuple[str, str, list[Any]]] = []  # kind of the section, its name, and its rows or simulation
    for kind in about:
        if kind == "appendix":
            parts += [(kind, f"{kind}_{number}", [points]) for number, points in enumerate(material.simulations)]
        elif kind == "own":
            names = dict.fromkeys(row.experiment for row in rows if row.experiment not in about)
            parts += [(kind, f"{kind}{i}", [row for row in rows if row.experiment == n]) for i, n in enumerate(names)]
        else:
            parts.append((kind, kind, [row for row in rows if row.experiment == kind]))
    left_out = (*WITHOUT_BASELINE, "drafters")  # drafters side by side are so many that nobody would read them
    timed = [row for row in rows if row.experiment not in left_out and row.metrics.decode_row_steps]
    parts.append(("time", "time", timed))
    made = []
    for kind, name, mine in parts:
        if not mine:
            continue
        text = about.get(kind) or texts["page"][kind]
        section = Section(name, escape(text["title"].format(first=mine[0])), text["claim"])
        if kind != "time":
            section.say(f"Made by {listed(dict.fromkeys(code(row.provenance.command) for row in mine))}.")
        section.warn_if_busy(*(row.metrics.other_cpu_share for row in mine if isinstance(row, Row)))
        introduction = len(section.blocks)
        _WRITERS.get(kind, methods.compare)(section, mine[0] if kind == "appendix" else frame(mine))
        if len(section.blocks) > introduction:
            made.append(section)
    if material.runs:
        made.append(origins.plain_runs(material.runs, **texts["page"]["runs"]))
    return [*made, origins.provenance(material, **texts["page"]["provenance"])]
