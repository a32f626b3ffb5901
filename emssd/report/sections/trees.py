"""Chains against token trees by batch size: speed-up, nodes of a step, and how deep drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from emssd.report.cells import Cell, Grid, grids, setting_names
from emssd.report.figures import Curve, colour, speed_chart
from emssd.report.floor import Floor
from emssd.report.sections.common import Section, begin, marks_of
from emssd.report.sources import Material
from emssd.report.tables import escape, grouped, pivot

__all__ = ["accepted_by_depth", "trees"]

_Found = Seq[tuple[Grid, Cell]]


def trees(material: Material) -> Section | None:
    """For each model and data: a table and a plot of speed-ups; tables of nodes, τ, steps, floors and depth."""
    rows = material.of("trees")
    found = [(grid, cell) for grid in grids(rows) for cell in grid.cells if cell.line.speculate]
    if not found:
        return None
    claim = (
        "Does a tree pay where a chain does? Each drafter with its chain and its trees, against plain greedy decoding "
        "in the same repeat. The budget policy decides how many nodes of each row are verified."
    )
    section = begin("trees", "Chains and token trees by batch size", claim, rows)
    settings = {grid.name: grid.setting._replace(drafter="", length="") for grid, _ in found}
    names = setting_names(settings.values())
    for (setting, line), mine in grouped(found, lambda each: (settings[each[0].name], each[1].line)).items():
        mark = marks_of(grid for grid, _ in mine)
        title = f"{names[setting]} · {line.label}" + (f" ({mark})" if mark else "")
        section.say(f"### {escape(title)}")
        section.say("Speed-up, median (least–greatest), by batch size:")
        _pivot(section, mine, Cell.speedup_text)
        section.draw(f"Speed-up by batch size: {title}", speed_chart(title, _curves(mine), mark))
        section.say("Verified nodes of a row in a step, and mean acceptance length τ:")
        _pivot(section, mine, lambda cell: f"{_nodes(cell):.1f}, τ {cell.median('mean_acceptance_length')}")
        section.say("Milliseconds of a decode step, and in brackets its floor, that of verifying its nodes:")
        _pivot(section, mine, _step_and_floor)
        section.say("The share of a row's steps in which a way of so many drafted tokens was accepted:")
        shares = {
            (f"{grid.setting.drafter}, batch {cell.batch_size}", f"≥ {depth}"): f"{share:.0%}"
            for grid, cell in mine
            for depth, share in accepted_by_depth(cell).items()
        }
        section.table(pivot("drafter", shares))
    return section


def accepted_by_depth(cell: Cell) -> dict[int, float]:
    """The share of row-steps that accept at least so many drafted tokens, which is how deep the accepted way is."""
    counts: dict[int, int] = {}
    for row in cell.rows:
        for tau, count in row.metrics["acceptance_histogram"].items():
            counts[int(tau) - 1] = counts.get(int(tau) - 1, 0) + count
    total = sum(counts.values())
    deepest = max((depth for depth, count in counts.items() if count), default=0)
    return {
        least: sum(count for depth, count in counts.items() if depth >= least) / total
        for least in range(1, deepest + 1)
    }


def _nodes(cell: Cell) -> float:
    histograms = [row.metrics["draft_length_histogram"] for row in cell.rows]
    nodes = sum(int(number) * count for each in histograms for number, count in each.items())
    return float(nodes / max(sum(sum(each.values()) for each in histograms), 1))


def _step_and_floor(cell: Cell) -> str:
    step = cell.median(lambda row: 1e3 * sum(row.metrics["decode_seconds"].values()) / row.metrics["decode_steps"])
    return f"{step} ({cell.median(lambda row: 1e3 * Floor.of(row).seconds)})"


def _pivot(section: Section, found: _Found, text: Callable[[Cell], str]) -> None:
    section.table(pivot("drafter", {(grid.setting.drafter, str(cell.batch_size)): text(cell) for grid, cell in found}))


def _curves(found: _Found) -> list[Curve]:
    by_drafter = grouped(found, lambda each: each[0].setting.drafter)
    return [
        Curve(name, {float(cell.batch_size): cell.speedup for _, cell in mine if cell.speedup}, colour(None, index))
        for index, (name, mine) in enumerate(by_drafter.items())
    ]
