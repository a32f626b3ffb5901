"""Up to which batch size speculation pays, from speed-ups by batch size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from emssd.report.cells import Cell, Grid, Spread
from emssd.report.lines import Line

__all__ = ["Crossing", "best_cell", "crossing_of", "speedups", "verdict"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a line of speed-ups falls below 1.

    Attributes:
        at: batch size at which the medians first do, interpolated on a logarithmic scale; ``None`` if they never do.
        before: batch sizes ahead of the first with a median of 1 or more; none if there is no such.
        again: batch sizes behind it with medians of 1 or more; without `at`, all with such medians.
        unclear: batch sizes at which repeats lie on both sides of 1.
    """

    at: float | None
    before: tuple[int, ...]
    again: tuple[int, ...]
    unclear: tuple[int, ...]


def crossing_of(speedups: Mapping[int, Spread]) -> Crossing:
    """The first crossing downwards of the medians, of at least one batch size."""
    sizes, at = sorted(speedups), None
    for left, right in itertools.pairwise(sizes):
        high, low = speedups[left].median, speedups[right].median
        if at is None and high >= 1 > low:
            at = 2 ** (log2(left) + (high - 1) / (high - low) * (log2(right) - log2(left)))
    first = next((size for size in sizes if speedups[size].median >= 1), sizes[0])
    before = tuple(size for size in sizes if size < first)
    again = tuple(size for size in sizes if speedups[size].median >= 1 and size > (at or 0))
    unclear = tuple(size for size in sizes if speedups[size].count > 1 and speedups[size].covers(1))
    return Crossing(at, before, again, unclear)


def verdict(name: str, speedups: Mapping[int, Spread]) -> str:
    """The crossing in a sentence or two."""
    found, sizes = crossing_of(speedups), sorted(speedups)
    if found.at is not None:
        back = f", though its median is 1 or more again at {_listed(found.again)}" if found.again else ""
        begins = f"does not pay yet at {_listed(found.before)}, and " if found.before else ""
        near = f"{found.at:.2g}" if found.at < 10 else f"{found.at:.0f}"
        said = f"{name} {begins}stops paying near batch size {near}{back}"
    elif list(found.again) == sizes:
        last = f"{sizes[-1]}: {speedups[sizes[-1]].text()}"
        said = f"{name} pays up to the largest batch size measured, by its medians ({last})"
    elif found.again:
        said = f"{name} pays only from batch size {found.again[0]} on, up to the largest measured ({sizes[-1]})"
    else:
        said = f"{name} pays at none of the batch sizes measured ({_listed(sizes)})"
    if found.unclear:
        said += f"; too close to call at {_listed(found.unclear)}, where repeats lie on both sides of 1"
    elif all(spread.count == 1 for spread in speedups.values()):
        said += "; one repeat each, so nothing is known of the spread"
    return said + "."


def best_cell(grid: Grid, batch_size: int) -> Cell | None:
    """The speculating cell of the largest speed-up at a batch size, which may be below 1.

    ``None`` if there is nothing to compare: no speculating cell, or none with a baseline.
    """
    cells = [cell for cell in grid.cells if cell.batch_size == batch_size and cell.speedup is not None]
    return max(cells, key=lambda cell: cell.speedup.median if cell.speedup else 0.0, default=None)


def speedups(grid: Grid, line: Line) -> dict[int, Spread]:
    """Of a line, by batch size, where there is a baseline."""
    found = {cell.batch_size: cell.speedup for cell in grid.cells if cell.line == line}
    return {size: spread for size, spread in found.items() if spread is not None}


def _listed(sizes: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, sizes))
