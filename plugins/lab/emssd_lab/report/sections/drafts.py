"""Drafters side by side: by kind of text, or, of chains and token trees, by batch size."""

from __future__ import annotations

from emssd_lab.report.cells import Cell, grids, marks, setting_names
from emssd_lab.report.figures import coloured, speed_chart
from emssd_lab.report.rows import Row
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import escape, grouped, pivot

__all__ = ["drafters"]


def drafters(section: Section, rows: list[Row]) -> None:
    """Tables of speed-ups and of acceptance, for each model, backend, budget, and batch size or kind of text."""
    by_size = section.name == "trees"
    found = [(grid, cell) for grid in grids(rows) for cell in grid.cells if cell.line.speculate]
    settings = {
        grid.name: grid.setting._replace(drafter="", length="", data=grid.setting.data if by_size else "")
        for grid, _ in found
    }
    names = setting_names(settings.values())
    groups = grouped(found, lambda pair: (settings[pair[0].name], not by_size and pair[1].batch_size, pair[1].line))
    several = by_size or len({line for *_, line in groups}) > 1
    for (setting, size, line), pairs in groups.items():
        mark = marks(row for _, cell in pairs for row in cell.rows)
        parts = [f"batch size {size}"] * bool(size) + [line.label] * several + [f"({mark})"] * bool(mark)
        title = " · ".join([names[setting], *parts])
        section.say(f"### {escape(title)}")
        keys = [(grid.setting.drafter, str(cell.batch_size) if by_size else grid.setting.data) for grid, cell in pairs]
        speedups = dict(zip(keys, (cell.speedup_text for _, cell in pairs), strict=True))
        section.table(pivot("drafter", speedups), "Speed-up, median (least–greatest):")
        said = "Mean acceptance length τ, drafted tokens of a row in a step, and the share that was accepted:"
        section.table(pivot("drafter", dict(zip(keys, (_accepted(cell) for _, cell in pairs), strict=True))), said)
        if by_size:
            lines = {
                drafter: {cell.batch_size: cell.speedup for _, cell in mine if cell.speedup}
                for drafter, mine in grouped(pairs, lambda pair: pair[0].setting.drafter).items()
            }
            section.draw(f"Speed-up by batch size: {title}", speed_chart(title, coloured(lines), mark))


def _accepted(cell: Cell) -> str:
    lengths, taus = cell.total("draft_length_histogram"), cell.total("acceptance_histogram")
    drafted = sum(number * count for number, count in lengths.items())
    accepted = sum((tau - 1) * count for tau, count in taus.items())
    share = f"{drafted / lengths.total():.1f}, {accepted / drafted:.0%}" if drafted else "nothing drafted"
    return f"{cell.median('mean_acceptance_length')} ({share})"
