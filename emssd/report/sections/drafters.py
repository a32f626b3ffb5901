"""Drafters side by side, by kind of text: what each gains, and how many of its drafted tokens are accepted."""

from __future__ import annotations

from emssd.report.cells import Cell, grids, setting_names
from emssd.report.sections.common import Section, begin, marks_of
from emssd.report.sources import Material
from emssd.report.tables import escape, grouped, pivot

__all__ = ["drafters"]


def drafters(material: Material) -> Section | None:
    """A table of speed-ups and one of acceptance, for each model, batch size, backend and budget."""
    rows = material.of("drafters")
    found = [(grid, cell) for grid in grids(rows) for cell in grid.cells if cell.line.speculate]
    if not found:
        return None
    claim = "Which drafter for which text, each against plain greedy decoding of the same text in the same repeat."
    section = begin("drafters", "Drafters side by side", claim, rows)
    settings = {grid.name: grid.setting._replace(drafter="", data="", length="") for grid, _ in found}
    names, several = setting_names(settings.values()), len({cell.line for _, cell in found}) > 1
    groups = grouped(found, lambda each: (settings[each[0].name], each[1].batch_size, each[1].line))
    for (setting, size, line), mine in groups.items():
        marks = [f"({mark})"] if (mark := marks_of(grid for grid, _ in mine)) else []
        title = [names[setting], f"batch size {size}", *([line.label] if several else []), *marks]
        section.say(f"### {escape(' · '.join(title))}")
        cells = {(grid.setting.drafter, grid.setting.data): cell for grid, cell in mine}
        section.say("Speed-up, median (least–greatest):")
        section.table(pivot("drafter", {place: cell.speedup_text() for place, cell in cells.items()}))
        section.say("Mean acceptance length τ, and the share of drafted tokens that were accepted:")
        section.table(pivot("drafter", {place: _accepted(cell) for place, cell in cells.items()}))
    return section


def _accepted(cell: Cell) -> str:
    drafted = sum(int(n) * count for row in cell.rows for n, count in row.metrics["draft_length_histogram"].items())
    accepted = sum(
        (int(tau) - 1) * count for row in cell.rows for tau, count in row.metrics["acceptance_histogram"].items()
    )
    share = f"{accepted / drafted:.0%}" if drafted else "nothing drafted"
    return f"{cell.median('mean_acceptance_length')} ({share})"
