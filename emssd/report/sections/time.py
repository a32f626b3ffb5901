"""Where the time of a step goes, by phase, and how far tokens/s are from their floor."""

from __future__ import annotations

import dataclasses
import statistics

from emssd.report.cells import Cell, Grid, Spread, grids
from emssd.report.figures import Curve, colour, curves, stacked
from emssd.report.floor import Floor
from emssd.report.lines import WITHOUT_BASELINE
from emssd.report.rows import Row
from emssd.report.sections.common import Plot, Section, begin, caveat, grid_curves, marked
from emssd.report.sources import Material
from emssd.report.text import escape

__all__ = ["floors", "phases"]

_SHOWN_FLOORS = ("greedy", "unpad_both", "ragged_greedy", "ragged", "flashinfer_greedy", "flashinfer", None)


def phases(material: Material) -> Section | None:
    """Milliseconds of a decode step by phase."""
    rows = _timed(material)
    if not rows:
        return None
    claim = (
        "The paper gives no times of the parts of a step. Here is where the milliseconds of a decode step go, by phase "
        "(see docs/metrics.md); on CUDA what the kernels still run after the call returns is counted in `verify`."
    )
    section = begin("phases", "Where the time of a step goes", claim, (row.provenance for row in rows))
    for index, (experiment, grid) in enumerate(_grids(rows)):
        section.head(escape(f"{experiment}: {grid.title}"))
        section.say(caveat(grid))
        names = list(grid.rows[0].metrics["decode_seconds"])
        cells = sorted(grid.cells, key=lambda cell: (cell.batch_size, cell.line.rank))
        split = [{name: _milliseconds(cell, name) for name in names} for cell in cells]
        section.table(
            ["batch", "method", "ms per step", *names, "outside forward"],
            (
                [
                    str(cell.batch_size),
                    escape(cell.line.label),
                    f"{sum(parts.values()):.2f}",
                    *(f"{parts[name]:.2f}" for name in names),
                    f"{1 - parts.get('forward', 0.0) / max(sum(parts.values()), 1e-12):.0%}",
                ]
                for cell, parts in zip(cells, split, strict=True)
            ),
            left=2,
        )
        labels = [f"{cell.batch_size} {cell.line.label}" for cell in cells]
        parts = {name: [each[name] for each in split] for name in names}
        svg = stacked(grid.title, "ms per decode step", parts, labels, mark=grid.mark)
        section.plots([Plot(f"phases_{index}", f"Milliseconds of a step by phase: {grid.title}", svg)],
                      "By batch size and method; the medians of repeats." + marked(grid.mark))  # fmt: skip
    return section


def floors(material: Material) -> Section | None:
    """Tokens/s against those of a machine that does nothing but what must be done, as fast as it was measured to be."""
    rows = [row for row in _timed(material) if Floor.of(row) is not None]
    if not rows:
        return None
    claim = (
        "The paper gives no floor. Here it is the larger of two times: weights and the rows' KV read once at the "
        "measured bandwidth, and the arithmetic of all computed tokens at the measured rate of a large product. What "
        "a draft model does is not in it."
    )
    section = begin("floors", "Tokens per second against the floor", claim, (row.provenance for row in rows))
    for index, (experiment, grid) in enumerate(_grids(rows)):
        section.head(escape(f"{experiment}: {grid.title}"))
        section.say(caveat(grid))
        section.say(_rates(grid))
        section.table(
            ["batch", "method", "tokens/s", "floor, tokens/s", "× floor's time", "bound by"],
            (_floor_line(cell) for cell in sorted(grid.cells, key=lambda cell: (cell.batch_size, cell.line.rank))),
            left=2,
        )
        section.plots([Plot(f"floors_{index}", f"Tokens/s and their floor by batch size: {grid.title}", _chart(grid))],
                      "Solid, measured; dotted, the floor of the same line." + marked(grid.mark))  # fmt: skip
        section.points(_nearest(grid))
    return section


def _timed(material: Material) -> list[Row]:
    """Rows of decoding; drafters side by side are so many settings that nobody would read them."""
    return [row for row in material.rows if row.experiment not in (*WITHOUT_BASELINE, "drafters")]


def _grids(rows: list[Row]) -> list[tuple[str, Grid]]:
    """Each cell once: what Figure 1 has is not shown again for an ablation of the same setting."""
    names = sorted(dict.fromkeys(row.experiment for row in rows), key=lambda name: name != "fig1")
    found, shown = [], set()
    for name in names:
        for grid in grids(row for row in rows if row.experiment == name):
            new = [cell for cell in grid.cells if (grid.setting, cell.line, cell.batch_size) not in shown]
            shown |= {(grid.setting, cell.line, cell.batch_size) for cell in new}
            if new:
                found.append((name, dataclasses.replace(grid, cells=tuple(new))))
    return found


def _milliseconds(cell: Cell, phase: str) -> float:
    return (
        1e3 * cell.spread(lambda row: row.metrics["decode_seconds"][phase] / max(row.metrics["decode_steps"], 1)).median
    )


def _rates(grid: Grid) -> str:
    hardware = [row.provenance["hardware"] for row in grid.rows]
    read, computed = (Spread.of(each[name] for each in hardware) for name in ("bytes_per_second", "flops_per_second"))
    return (
        f"Measured: {read.median / 1e9:,.3g} GB/s, {computed.median / 1e12:,.3g} TFLOP/s in {grid.setting.dtype}; "
        f"weights {grid.rows[0].costs['weight_bytes'] / 1e6:,.4g} MB."
    )


def _floor_line(cell: Cell) -> list[str]:
    found = [floor for row in cell.rows if (floor := Floor.of(row)) is not None]
    rate = statistics.median(floor.tokens_per_second for floor in found)
    bounds = " or ".join(dict.fromkeys(floor.bound for floor in found))
    return [
        str(cell.batch_size),
        escape(cell.line.label),
        cell.tokens_per_second.text(",.0f"),
        f"{rate:,.0f}",
        cell.spread(_times_floor).text(".1f"),
        bounds,
    ]


def _times_floor(row: Row) -> float:
    return _floor_rate(row) / float(row.metrics["decode_tokens_per_second"])


def _floor_rate(row: Row) -> float:
    floor = Floor.of(row)
    assert floor is not None
    return floor.tokens_per_second


def _chart(grid: Grid) -> str:
    lines = grid_curves(grid, lambda cell: cell.tokens_per_second, methods=_SHOWN_FLOORS)
    for index, line in enumerate(grid.lines):
        if line.method in _SHOWN_FLOORS:
            mine = [cell for cell in grid.cells if cell.line == line]
            points = {float(cell.batch_size): cell.spread(_floor_rate).median for cell in mine}
            lines.append(Curve("", points, colour(line.method, index), "floor"))
    return curves(grid.title, "batch size / rows", "tokens/s of decode steps", lines, mark=grid.mark)


def _nearest(grid: Grid) -> list[str]:
    ranked = sorted(grid.cells, key=lambda cell: cell.spread(_times_floor).median)
    said = [
        f"{escape(cell.line.label)} at batch size {cell.batch_size}, {cell.spread(_times_floor).median:.1f} times as "
        "long"
        for cell in (ranked[0], ranked[-1])
    ]
    return [f"Nearest to its floor: {said[0]}; farthest: {said[1]}."] if len(ranked) > 1 else []
