"""The tables of experiments on the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from emssd_lab.report.cells import grids
from emssd_lab.report.rows import Row, Simulation, parse
from emssd_lab.report.sections.acceptance import expected_ratio
from emssd_lab.report.sections.methods import crossings, speed_table
from emssd_lab.report.sections.steps import step_table, steps_of
from emssd_lab.report.tables import Table as PlainTable
from emssd_lab.report.tables import grouped

__all__ = ["summary"]


def summary(rows: Iterable[Mapping[str, Any]]) -> list[RenderableType]:
    """The tables of each experiment, each below its title, of rows as in ``rows.jsonl``."""
    shown: list[tuple[str, PlainTable]] = []
    for row in (parsed := [parse(value, where=f"row {number}") for number, value in enumerate(rows, 1)]):
        if isinstance(row, Simulation):
            title = f"{row.experiment}: expected padding ratio by p and batch size, τ at most {row.max_acceptance}"
            shown.append((title, expected_ratio(row)))
    measured = grouped((row for row in parsed if isinstance(row, Row)), lambda row: row.experiment)
    for experiment, mine in measured.items():
        timed = experiment == "step_time"
        for grid in steps_of(mine) if timed else grids(mine):
            shown.append((f"{experiment}: {grid.title}", step_table(grid) if timed else speed_table(grid)))
            if experiment == "crossover":
                shown.append(("Where speculation pays", crossings(grid)))
    return [part for title, table in shown for part in (Text("\n" + title, style="bold"), table.console())]
