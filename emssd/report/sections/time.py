"""Where the time of a step goes, by phase, and how far it is from its floor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from emssd.report.cells import WITHOUT_BASELINE, Cell, grids
from emssd.report.figures import stacked
from emssd.report.floor import Floor
from emssd.report.rows import Row, per
from emssd.report.sections.common import CELL, Section
from emssd.report.sources import Material
from emssd.report.tables import grouped, table_of

__all__ = ["time_of_steps"]


def time_of_steps(material: Material) -> Section | None:
    """Milliseconds of a decode step by phase, and tokens/s beside their floor."""
    left_out = (*WITHOUT_BASELINE, "drafters")  # drafters side by side are so many that nobody would read them
    rows = [row for row in material.rows if row.experiment not in left_out and row.metrics["decode_row_steps"]]
    if not rows:
        return None
    claim = (
        "Milliseconds of a mean decode step by phase; tokens/s are tokens per row and step × rows per step ÷ time. The "
        "floor is the larger of two times: reading the weights and the rows' KV once at the measured bandwidth, and "
        "computing all tokens at the measured rate of a large product; a draft model's work is not in it."
    )
    section = Section("time", "Where the time of a step goes, and its floor", [claim])
    section.warn_if_busy(*(row.metrics for row in rows))
    by_experiment = grouped(rows, lambda row: row.experiment)
    for experiment, grid in ((name, grid) for name, mine in by_experiment.items() for grid in grids(mine)):
        section.head(grid, f"{experiment}: ")
        names = list(grid.rows[0].metrics["decode_seconds"])
        section.table(table_of(grid.cells, CELL | _columns(names), left=2))
        parts = {name: [cell.spread(partial(_ms, name)).median for cell in grid.cells] for name in names}
        labels = [f"{cell.batch_size} {cell.line.label}" for cell in grid.cells]
        svg = stacked(grid.title, "ms per decode step", parts, labels, mark=grid.mark)
        section.draw(f"Milliseconds of a step by phase: {grid.title}", svg)
    return section


def _columns(names: list[str]) -> dict[str, Callable[[Cell], str]]:
    figures: dict[str, Callable[[Row], float]] = {
        "tokens / row and step": per("decode_new_tokens", "decode_row_steps"),
        "rows / step": per("decode_row_steps", "decode_steps"),
        "ms / step": lambda row: sum(_ms(name, row) for name in names),
    }
    figures |= {name: partial(_ms, name) for name in names}
    figures |= {
        "floor, ms": lambda row: 1e3 * Floor.of(row).seconds,
        "× floor": lambda row: Floor.of(row).tokens_per_second / row.rate,
    }
    return {name: partial(Cell.median, figure=figure) for name, figure in figures.items()} | {
        "floor bound by": lambda cell: " or ".join(dict.fromkeys(Floor.of(row).bound for row in cell.rows)),
        "by FLOPs from, tokens / row": lambda cell: str(Floor.of(cell.rows[0]).arithmetic_from),
    }


def _ms(phase: str, row: Row) -> float:
    return float(1e3 * row.metrics["decode_seconds"][phase] / row.metrics["decode_steps"])
