"""Up to which batch size speculation pays, and what to run at each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import log2

from emssd.report.cells import Grid, Spread, grids
from emssd.report.figures import speed_chart
from emssd.report.sections.common import Section, begin, speedup_curves
from emssd.report.sections.comparisons import speed_table
from emssd.report.sources import Material
from emssd.report.tables import Table, grouped, listed

__all__ = ["advice", "crossing_at", "crossings", "crossover"]


def crossover(material: Material) -> Section | None:
    """Where the speed-up of each line crosses 1, and the setting of the largest speed-up at each batch size."""
    rows = material.of("crossover")
    if not rows:
        return None
    claim = "Up to which batch size speculation pays, for one model, machine and kind of prompts."
    section = begin("crossover", "Crossover: where speculation stops paying", claim, rows)
    for grid in grids(rows):
        section.head(grid)
        section.table(crossings(grid))
        section.table(advice(grid))
        section.table(speed_table(grid))
        chart = speed_chart(grid.title, speedup_curves(grid), grid.mark)
        section.draw(f"Speed-up by batch size: {grid.title}", chart)
    return section


def crossings(grid: Grid) -> Table:
    """The batch sizes at which each line pays, and where its median speed-up first falls below 1."""
    lines = []
    for line, cells in grid.by_line().items():
        if speedups := {cell.batch_size: spread for cell in cells if (spread := cell.speedup)}:
            pays = [size for size, spread in speedups.items() if spread.median >= 1]
            unclear = [size for size, spread in speedups.items() if spread.count > 1 and spread.covers(1)]
            at = crossing_at(speedups)
            near = "" if at is None else f"{at:.2g}" if at < 10 else f"{at:.0f}"
            lines.append([line.label, listed(pays), listed(unclear), near])
    return Table(["method", "pays at batch size", "repeats on both sides of 1 at", "falls below 1 near"], lines)


def crossing_at(speedups: Mapping[int, Spread]) -> float | None:
    """The batch size at which the medians first fall below 1, interpolated on a logarithmic scale."""
    for left, right in itertools.pairwise(sorted(speedups)):
        high, low = speedups[left].median, speedups[right].median
        if high >= 1 > low:
            return float(2 ** (log2(left) + (high - 1) / (high - low) * (log2(right) - log2(left))))
    return None


def advice(grid: Grid) -> Table:
    """The fastest at each batch size, and how sure that is."""
    lines = []
    for size, cells in grouped(grid.cells, lambda cell: cell.batch_size).items():
        compared = [(spread.median, spread, cell) for cell in cells if (spread := cell.speedup)]
        if not compared:
            tried = any(cell.line.speculate for cell in cells)
            why = "no row of plain greedy decoding" if tried else "nothing but plain greedy decoding was run"
            lines.append([str(size), "", f"not known: {why}"])
            continue
        _, gain, cell = max(compared, key=lambda each: each[0])
        use = f"{grid.setting.drafter}, {cell.line.label}" if gain.median > 1 else "plain greedy decoding"
        note = " (one repeat)" if gain.count == 1 else " (too close to call)" if gain.covers(1) else ""
        lines.append([str(size), gain.text(), use + note])
    return Table(["batch", "largest speed-up", "use"], lines, left=3)
