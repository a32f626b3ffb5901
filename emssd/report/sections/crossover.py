"""Up to which batch size speculation pays, and what to run at each."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from emssd.report.cells import Cell, Grid, grids, num_repeats
from emssd.report.crossing import best_cell, speedups, verdict
from emssd.report.rows import Row
from emssd.report.sections.common import Plot, Section, begin, caveat, speed_chart
from emssd.report.sections.speedups import speed_table
from emssd.report.sources import Material
from emssd.report.text import code, escape

__all__ = ["command_for", "crossover"]

_OF_THE_SWEEP = ("experiment", "size", "output_dir", "repeat", "method", "overwrite", "resume", "progress", "speculate",
                 "batch_size", "budget", "drafter", "hydra")  # fmt: skip


def crossover(material: Material) -> Section | None:
    """The batch size at which speculation stops paying, in words, and the fastest setting at each."""
    rows = material.of("crossover")
    if not rows:
        return None
    claim = (
        "The paper's speed-ups fall with the batch size, and below 1 for the vanilla method. Up to which batch size "
        "speculation pays is measured here for one model, machine and kind of prompts."
    )
    found = grids(rows)
    title = "Crossover: where speculation stops paying"
    section = begin("crossover", title, claim, (row.provenance for row in rows), num_repeats(found))
    for index, grid in enumerate(found):
        section.head(escape(grid.title))
        section.say(caveat(grid))
        by_line = {line.label: speedups(grid, line) for line in grid.lines}
        section.points(escape(verdict(name, values)) for name, values in by_line.items() if values)
        section.say("What to run at each batch size:")
        section.table(["batch", "speed-up", "use", "command"], _advice(grid), left=1)
        speed_table(section, grid, "", "")
        plot = Plot(f"crossover_{index}", f"Speed-up by batch size: {grid.title}", speed_chart(grid, grid.title))
        marked = f" **{grid.mark}**." if grid.mark else ""
        section.plots(
            [plot], f"Medians, bars from the least to the greatest repeat; crossings by log batch size.{marked}"
        )
    return section


def _advice(grid: Grid) -> Iterable[list[str]]:
    for size in grid.batch_sizes:
        best, sure = best_cell(grid, size)
        measured = [cell for cell in grid.cells if cell.batch_size == size]
        close = (
            "" if sure else " (too close to call)" if max(len(cell.rows) for cell in measured) > 1 else " (one repeat)"
        )
        if best is None or best.speedup is None:
            greedy = next((cell for cell in measured if not cell.line.speculate), None)
            row = greedy.rows[0] if greedy else measured[0].rows[0]
            yield [str(size), "1", "plain greedy decoding" + close, code(command_for(row, speculate=False))]
        else:
            yield [str(size), best.speedup.text(), _name(best) + close, code(command_for(best.rows[0]))]


def _name(cell: Cell) -> str:
    row = cell.rows[0]
    return escape(f"{row.drafter_options}, budget {row.budget_options}")


def command_for(row: Row, *, speculate: bool = True) -> str:
    """The command line of a run like `row`, without the sweep; or of plain greedy decoding instead."""
    kept = [
        item
        for item in row.overrides
        if item.partition("=")[0].lstrip("+~").partition(".")[0] not in _OF_THE_SWEEP
        or (speculate and item.startswith(("drafter.", "budget.")))
    ]
    if not row.overrides:
        kept = [
            f"model={row.model}",
            f"data={row.data}",
            f"backend={row.backend}",
            f"max_new_tokens={row.max_new_tokens}",
        ]
    chosen = [f"drafter={row.drafter}", f"budget={row.budget}"] if speculate else ["drafter=none"]
    return " ".join(["python -m emssd", *map(shlex.quote, [*kept, *chosen, f"batch_size={row.batch_size}"])])
