"""Drafters side by side, by kind of text; and chains beside token trees, by batch size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from emssd.report.cells import Cell, Grid, Setting, grids, setting_names
from emssd.report.figures import coloured, speed_chart
from emssd.report.rows import Row
from emssd.report.sections.common import About, Section, marks_of
from emssd.report.sections.steps import Floor
from emssd.report.tables import escape, grouped, pivot

__all__ = ["DRAFTERS", "TREES"]

_Found = Seq[tuple[Grid, Cell]]


def _speculating(rows: list[Row], **apart: Any) -> tuple[_Found, dict[str, Setting], dict[Setting, str]]:
    """Cells that speculate; by name of their grid the settings without what is `apart`, and the names of these."""
    found = [(grid, cell) for grid in grids(rows) for cell in grid.cells if cell.line.speculate]
    settings = {grid.name: grid.setting._replace(**apart) for grid, _ in found}
    return found, settings, setting_names(settings.values())


def _drafters(section: Section, rows: list[Row]) -> None:
    """A table of speed-ups and one of acceptance, for each model, batch size, backend and budget."""
    found, settings, names = _speculating(rows, drafter="", data="", length="")
    several = len({cell.line for _, cell in found}) > 1
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


def _trees(section: Section, rows: list[Row]) -> None:
    """For each model and data: a table and a plot of speed-ups; tables of nodes, τ, steps, floors and depth."""
    found, settings, names = _speculating(rows, drafter="", length="")
    for (setting, line), mine in grouped(found, lambda each: (settings[each[0].name], each[1].line)).items():
        mark = marks_of(grid for grid, _ in mine)
        title = f"{names[setting]} · {line.label}" + (f" ({mark})" if mark else "")
        section.say(f"### {escape(title)}")
        section.say("Speed-up, median (least–greatest), by batch size:")
        _pivot(section, mine, Cell.speedup_text)
        speedups = {
            drafter: {cell.batch_size: cell.speedup for _, cell in cells if cell.speedup}
            for drafter, cells in grouped(mine, lambda each: each[0].setting.drafter).items()
        }
        section.draw(f"Speed-up by batch size: {title}", speed_chart(title, coloured(speedups), mark))
        section.say("Verified nodes of a row in a step, and mean acceptance length τ:")
        _pivot(section, mine, lambda cell: f"{_nodes(cell):.1f}, τ {cell.median('mean_acceptance_length')}")
        section.say("Milliseconds of a decode step, and in brackets its floor, that of verifying its nodes:")
        _pivot(section, mine, _step_and_floor)
        section.say("The share of a row's steps in which a way of so many drafted tokens was accepted:")
        shares = {
            (f"{grid.setting.drafter}, batch {cell.batch_size}", f"≥ {depth}"): f"{share:.0%}"
            for grid, cell in mine
            for depth, share in _accepted_by_depth(cell).items()
        }
        section.table(pivot("drafter", shares))


DRAFTERS = About(
    "drafters",
    "Drafters side by side",
    "Which drafter for which text, each against plain greedy decoding of the same text in the same repeat.",
    _drafters,
)
TREES = About(
    "trees",
    "Chains and token trees by batch size",
    "Does a tree pay where a chain does? Each drafter with its chain and its trees, against plain greedy decoding "
    "in the same repeat. The budget policy decides how many nodes of each row are verified.",
    _trees,
)


def _counts(cell: Cell, histogram: str) -> Counter[int]:
    counts = Counter[int]()
    for row in cell.rows:
        counts.update({int(number): count for number, count in row.metrics[histogram].items()})
    return counts


def _accepted(cell: Cell) -> str:
    drafted = sum(number * count for number, count in _counts(cell, "draft_length_histogram").items())
    accepted = sum((tau - 1) * count for tau, count in _counts(cell, "acceptance_histogram").items())
    share = f"{accepted / drafted:.0%}" if drafted else "nothing drafted"
    return f"{cell.median('mean_acceptance_length')} ({share})"


def _accepted_by_depth(cell: Cell) -> dict[int, float]:
    """The share of row-steps that accept at least so many drafted tokens, which is how deep the accepted way is."""
    counts = _counts(cell, "acceptance_histogram")
    longest = max((tau for tau, count in counts.items() if count), default=1)
    return {
        least: sum(count for tau, count in counts.items() if tau > least) / counts.total()
        for least in range(1, longest)
    }


def _nodes(cell: Cell) -> float:
    counts = _counts(cell, "draft_length_histogram")
    return sum(number * count for number, count in counts.items()) / max(counts.total(), 1)


def _step_and_floor(cell: Cell) -> str:
    step = cell.median(lambda row: 1e3 * sum(row.metrics["decode_seconds"].values()) / row.metrics["decode_steps"])
    return f"{step} ({cell.median(lambda row: 1e3 * Floor.of(row).seconds)})"


def _pivot(section: Section, found: _Found, text: Callable[[Cell], str]) -> None:
    section.table(pivot("drafter", {(grid.setting.drafter, str(cell.batch_size)): text(cell) for grid, cell in found}))
