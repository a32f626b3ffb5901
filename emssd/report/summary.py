"""What an experiment showed, on the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from emssd.report.cells import Cell, Grid, grids
from emssd.report.crossing import speedups, verdict
from emssd.report.lines import WITHOUT_BASELINE
from emssd.report.rows import Row, Simulation, parse
from emssd.report.steps import milliseconds, steps_of

__all__ = ["summary"]


def summary(rows: Iterable[Mapping[str, Any]]) -> list[RenderableType]:
    """A compact table for each experiment, and of ``crossover`` what it says, in words.

    Args:
        rows: as in ``rows.jsonl``.

    Raises:
        ConfigError: they are rows of another format.
    """
    shown: list[RenderableType] = []
    measured: dict[str, list[Row]] = {}
    for number, value in enumerate(rows, 1):
        row = parse(value, where=f"row {number}")
        if isinstance(row, Simulation):
            shown += _simulated(row)
        else:
            measured.setdefault(row.experiment, []).append(row)
    for experiment, members in measured.items():
        if experiment == "step_time":
            shown += _step_times(members)
            continue
        for grid in grids(members):
            shown += [_title(f"{experiment}: {grid.title}"), _table(grid), *_words(experiment, grid)]
    return shown


def _table(grid: Grid) -> Table:
    table = _plain_table()
    table.add_column("")
    for name in ("batch", "tokens/s", "speed-up", "τ", "padding/new", "repeats"):
        table.add_column(name, justify="right")
    for line in grid.lines:
        for cell in sorted((cell for cell in grid.cells if cell.line == line), key=lambda cell: cell.batch_size):
            table.add_row(line.label, str(cell.batch_size), *_figures(cell))
    return table


def _figures(cell: Cell) -> list[str]:
    speedup = "" if cell.speedup is None else cell.speedup.text() + "×"
    return [
        cell.tokens_per_second.text(".0f"),
        speedup,
        f"{cell.spread('mean_acceptance_length').median:.2f}",
        f"{cell.spread('padding_per_new_token').median:.0%}",
        str(len(cell.rows)),
    ]


def _words(experiment: str, grid: Grid) -> list[RenderableType]:
    if experiment in WITHOUT_BASELINE:
        return []
    missing = [Text(missing + ".", style="yellow") for missing in grid.missing]
    if experiment != "crossover":
        return [*missing]
    found = {line.label: speedups(grid, line) for line in grid.lines}
    return [*missing, *(Text(verdict(name, values)) for name, values in found.items() if values)]


def _step_times(rows: list[Row]) -> list[RenderableType]:
    shown: list[RenderableType] = []
    for steps in steps_of(rows):
        table = _plain_table()
        for name in ("batch", "tokens per sample", "ms per step"):
            table.add_column(name, justify="right")
        for batch_size, by_tokens in steps.cells.items():
            for tokens, repeats in by_tokens.items():
                table.add_row(str(batch_size), str(tokens), milliseconds(repeats).text())
        wrong = ", drafts wrong throughout" if steps.longest_acceptance == 1 else ""
        shown += [_title(f"step_time: {steps.title}{wrong}"), table]
    return shown


def _simulated(rows: Simulation) -> list[RenderableType]:
    table = _plain_table()
    sizes = sorted({point["batch_size"] for point in rows.points})
    table.add_column("p", justify="right")
    for size in sizes:
        table.add_column(f"b = {size}", justify="right")
    for chance in sorted({point["p"] for point in rows.points}):
        found = {each["batch_size"]: each["exact"]["padding_ratio"] for each in rows.points if each["p"] == chance}
        table.add_row(f"{chance:g}", *(f"{found[size]:.1%}" if size in found else "" for size in sizes))
    title = f"{rows.experiment}: expected padding ratio by p and batch size, τ at most {rows.max_acceptance}"
    return [_title(title), table]


def _title(title: str) -> Text:
    return Text("\n" + title, style="bold")


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False)
