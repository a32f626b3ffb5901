"""Drafters side by side, by kind of text; and chains beside token trees, by batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from emssd.report.cells import Cell, Grid, Line, grids, marks, setting_names
from emssd.report.figures import coloured, speed_chart
from emssd.report.rows import Row
from emssd.report.sections.acceptance import share_of_at_least
from emssd.report.sections.common import Section
from emssd.report.sections.steps import Floor, step_ms
from emssd.report.tables import Table, escape, grouped, pivot

__all__ = ["drafters", "trees"]


class _Group(NamedTuple):
    """Cells that speculate and are shown together."""

    setting: str
    line: Line
    batch_size: int
    found: Seq[tuple[Grid, Cell]]

    @property
    def mark(self) -> str:
        return marks(row for _, cell in self.found for row in cell.rows)

    def by_data(self, text: Callable[[Cell], str | None]) -> Table:
        """A text of each cell, by drafter and data."""
        return pivot("drafter", {(grid.setting.drafter, grid.setting.data): text(cell) for grid, cell in self.found})

    def by_size(self, text: Callable[[Cell], str | None]) -> Table:
        """A text of each cell, by drafter and batch size."""
        return pivot("drafter", {(grid.setting.drafter, str(cell.batch_size)): text(cell) for grid, cell in self.found})


def _groups(rows: Iterable[Row], *, by_size: bool, **apart: Any) -> list[_Group]:
    """By line and setting, without what is `apart` of it, and by batch size where that is asked for."""
    found = [(grid, cell) for grid in grids(rows) for cell in grid.cells if cell.line.speculate]
    settings = {grid.name: grid.setting._replace(drafter="", length="", **apart) for grid, _ in found}
    names = setting_names(settings.values())
    groups = grouped(found, lambda each: (settings[each[0].name], each[1].batch_size * by_size, each[1].line))
    return [_Group(names[setting], line, size, mine) for (setting, size, line), mine in groups.items()]


def drafters(section: Section, rows: list[Row]) -> None:
    """A table of speed-ups and one of acceptance, for each model, batch size, backend and budget."""
    groups = _groups(rows, by_size=True, data="")
    several = len({group.line for group in groups}) > 1
    for group in groups:
        parts = [group.setting, f"batch size {group.batch_size}", *[group.line.label] * several]
        section.say(f"### {escape(' · '.join(parts + [f'({group.mark})'] * bool(group.mark)))}")
        section.table(group.by_data(lambda cell: cell.speedup_text), "Speed-up, median (least–greatest):")
        said = "Mean acceptance length τ, and the share of drafted tokens that were accepted:"
        section.table(group.by_data(_accepted), said)


def trees(section: Section, rows: list[Row]) -> None:
    """For each model and data: a table and a plot of speed-ups; tables of nodes, τ, steps, floors and depth."""
    for group in _groups(rows, by_size=False):
        title = f"{group.setting} · {group.line.label}" + (f" ({group.mark})" if group.mark else "")
        section.say(f"### {escape(title)}")
        section.table(
            group.by_size(lambda cell: cell.speedup_text), "Speed-up, median (least–greatest), by batch size:"
        )
        speedups = {
            drafter: {cell.batch_size: cell.speedup for _, cell in cells if cell.speedup}
            for drafter, cells in grouped(group.found, lambda each: each[0].setting.drafter).items()
        }
        section.draw(f"Speed-up by batch size: {title}", speed_chart(title, coloured(speedups), group.mark))
        section.table(group.by_size(_nodes), "Verified nodes of a row in a step, and mean acceptance length τ:")
        said = "Milliseconds of a decode step, and in brackets its floor, that of verifying its nodes:"
        section.table(group.by_size(_step), said)
        shares = {
            (f"{grid.setting.drafter}, batch {cell.batch_size}", f"≥ {depth}"): f"{share:.0%}"
            for grid, cell in group.found
            for depth, share in share_of_at_least(cell.total("acceptance_histogram")).items()
        }
        said = "The share of a row's steps in which a way of so many drafted tokens was accepted:"
        section.table(pivot("drafter", shares), said)


def _accepted(cell: Cell) -> str:
    drafted = sum(number * count for number, count in cell.total("draft_length_histogram").items())
    accepted = sum((tau - 1) * count for tau, count in cell.total("acceptance_histogram").items())
    share = f"{accepted / drafted:.0%}" if drafted else "nothing drafted"
    return f"{cell.median('mean_acceptance_length')} ({share})"


def _nodes(cell: Cell) -> str:
    counts = cell.total("draft_length_histogram")
    nodes = sum(number * count for number, count in counts.items()) / max(counts.total(), 1)
    return f"{nodes:.1f}, τ {cell.median('mean_acceptance_length')}"


def _step(cell: Cell) -> str:
    return f"{cell.median(step_ms)} ({cell.median(lambda row: 1e3 * Floor.of(row).seconds)})"
