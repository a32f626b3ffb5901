"""The sections of a report. ``sections.toml`` has their titles and first paragraphs, in the order of the page."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emssd_lab.report.rows import Material, Row
from emssd_lab.report.sections import acceptance, drafts, methods, origins, steps
from emssd_lab.report.sections.common import Plot, Section
from emssd_lab.report.tables import code, escape, grouped, listed

__all__ = ["Plot", "Section", "sections"]

_WRITERS: dict[str, Callable[[Section, list[Any]], None]] = {  # the others compare methods
    "padding_ratio": acceptance.padding_ratio,
    "acceptance": acceptance.acceptance,
    "step_time": steps.step_time,
    "appendix": acceptance.appendix,
    "crossover": methods.crossover,
    "never_slower": methods.never_slower,
    "drafters": drafts.drafters,
    "trees": drafts.drafters,
}


def sections(material: Material) -> list[Section]:
    """All sections that `material` has rows for; the last one says where all of it comes from."""
    about = tomllib.loads(Path(__file__).with_name("sections.toml").read_text(encoding="utf-8"))
    measured = grouped(material.rows, lambda row: row.experiment)
    own = [rows for name, rows in measured.items() if name not in about]
    found = []
    for kind, texts in about.items():
        parts: dict[str, list[Any]]
        if kind == "appendix":
            parts = {f"appendix_{number}": [each] for number, each in enumerate(material.simulations)}
        elif kind == "own":
            parts = {f"own{number}": rows for number, rows in enumerate(own)}
        else:
            parts = {kind: measured[kind]} if kind in measured else {}
        for name, rows in parts.items():
            commands = listed(dict.fromkeys(code(row.provenance.command) for row in rows))
            title = escape(texts["title"].format(first=rows[0]))
            section = Section(name, title, texts["claim"], f"Made by {commands}.")
            section.warn_if_busy(*(row.metrics.other_cpu_share for row in rows if isinstance(row, Row)))
            introduction = len(section.blocks)
            _WRITERS.get(kind, methods.compare)(section, rows)
            if len(section.blocks) > introduction:
                found.append(section)
    plain = [*steps.time_of_steps(material.rows), *origins.plain_runs(material.runs), origins.provenance(material)]
    return [*found, *plain]
