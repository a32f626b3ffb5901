"""The tables of experiments on the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from emssd_lab.report.cells import frame, grids
from emssd_lab.report.rows import Row, Simulation, parse
from emssd_lab.report.sections.acceptance import expected_ratio
from emssd_lab.report.sections.methods import crossings, speed_table
from emssd_lab.report.sections.steps import step_table, steps_of

__all__ = ["summary"]


def summary(values: Iterable[Mapping[str, Any]]) -> list[RenderableType]:
    """The tables of each experiment, each below its title, of rows as in ``rows.jsonl``."""
    rows = [parse(value, where=f"row {number}") for number, value in enumerate(values, 1)]
    shown = [
        (f"{row.experiment}: expected padding ratio by p and batch size, τ at most {row.max_acceptance}",
         expected_ratio(row))
        for row in rows if isinstance(row, Simulation)
    ]  # fmt: skip
    for experiment in dict.fromkeys(row.experiment for row in rows if isinstance(row, Row)):
        mine = frame(row for row in rows if isinstance(row, Row) and row.experiment == experiment)
        is_timed = experiment == "step_time"
        for grid in steps_of(mine) if is_timed else grids(mine):
            shown.append((f"{experiment}: {grid.title}", step_table(grid) if is_timed else speed_table(grid)))
            if experiment == "crossover":
                shown.append(("Where speculation pays", crossings(grid)))
    return [part for title, table in shown for part in (Text("\n" + title, style="bold"), table.console())]
