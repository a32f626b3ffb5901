"""Acceptance by sample, by batch, and by place in a draft; and what aligning a batch wastes, measured and expected."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from emssd_lab.report import paper
from emssd_lab.report.cells import Spread, grids, marks
from emssd_lab.report.figures import Curve, colour, coloured, curves, histograms
from emssd_lab.report.rows import Row, Simulation
from emssd_lab.report.sections.common import Section, short_names
from emssd_lab.report.tables import Table, pivot

__all__ = ["acceptance", "appendix", "expected_ratio", "padding_ratio"]

_BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32)


def acceptance(section: Section, rows: list[Row]) -> None:
    """Mean τ by sample, the least of a batch, and acceptance by place in a draft."""
    if not (found := grids(row for row in rows if row.speculate)):
        return
    shown = {name: grid.rows[0] for name, grid in zip(short_names(found), found, strict=True)}
    mark = marks(row for grid in found for row in grid.rows)
    samples = {name: row.samples.acceptance_length for name, row in shown.items()}
    least = {name: _least_of_batches(taus) for name, taus in samples.items()}
    figures = {
        name: {
            "samples": str(len(taus)),
            "mean τ": f"{statistics.mean(taus):.2f}",
            "standard deviation": f"{statistics.pstdev(taus):.2f}",
        }
        for name, taus in samples.items()
    }
    _table(section, least, "least of {}", ".2f", figures)
    title = "Mean acceptance length τ of each sample"
    section.draw(title, histograms(title, "τ / tokens", samples, mark=mark))
    title = "Least τ of a batch, mean of consecutive full batches"
    section.draw(title, curves(title, "batch size / rows", "least τ / tokens", coloured(least), mark=mark))
    shares = {
        name: _accepted_by_position(
            row.metrics.acceptance_histogram,
            row.metrics.draft_depth_histogram or row.metrics.draft_length_histogram,
        )
        for name, row in shown.items()
    }
    if any(shares.values()):
        section.say("### By place in the draft")
        section.say("The share of drafts of at least j tokens one after another of which j were accepted.")
        _table(section, shares, "{}", ".0%")
        title, ylabel = "Accepted, by place in the draft", "share of drafts that reach j"
        section.draw(title, curves(title, "place j", ylabel, coloured(shares), mark=mark, log=False))


def _table(
    section: Section, by_place: Mapping[str, Mapping[int, float]], column: str, form: str,
    before: Mapping[str, dict[str, str]] | None = None,
) -> None:  # fmt: skip
    """A line for each name, with a column for each place that some name has a figure for, from the smallest."""
    places = sorted({place for values in by_place.values() for place in values})
    section.table(
        Table.of(
            {"model, drafter, data": name}
            | (before or {}).get(name, {})
            | {column.format(place): f"{values[place]:{form}}" if place in values else "" for place in places}
            for name, values in by_place.items()
        )
    )


def _least_of_batches(taus: Seq[float]) -> dict[int, float]:
    """Mean over consecutive full batches of the least of the batch, by batch size; rows left over are left out."""
    found = {}
    for size in _BATCHES:
        batches = [taus[i : i + size] for i in range(0, len(taus) - size + 1, size)]
        if batches:
            found[size] = statistics.mean(map(min, batches))
    return found


def _accepted_by_position(acceptance: Mapping[str, int], drafted: Mapping[str, int]) -> dict[int, float]:
    """The share of drafts with a token at depth j (from 1) of which j tokens were accepted.

    Row-steps with τ > j accepted j tokens at least, so this is their number ÷ that of drafts at least j deep.

    Args:
        acceptance: row-steps by τ, the target's own token included.
        drafted: row-steps by depth of the drafted tree; of a chain, its length.
    """
    longest = max((int(length) for length, count in drafted.items() if count), default=0)
    return {
        j: sum(n for tau, n in acceptance.items() if int(tau) > j) / sum(n for k, n in drafted.items() if int(k) >= j)
        for j in range(1, longest + 1)
    }


_RATIOS = {"padding_per_new_token": "padding per new token", "padding_ratio": "δ̄/τ_max"}


def padding_ratio(section: Section, rows: list[Row]) -> None:
    """Both padding ratios by batch size, as tables and as plots, beside those that the paper quotes."""
    if not (found := grids(row for row in rows if row.method == "vanilla")):
        return
    section.say(
        "*Padding per new token* is that of the paper's code: (padding tokens fed + KV slots lost) ÷ new tokens of "
        "decode steps. *δ̄/τ_max* is that of its appendix: by which share the rows' mean acceptance is shorter than the "
        "longest, as a mean of decode steps."
    )
    cells = sorted(((grid, cell) for grid in found for cell in grid.cells), key=lambda each: each[1].batch_size)
    charts = []
    for name, label in _RATIOS.items():
        texts = {(grid.title, str(cell.batch_size)): cell.median(name, ".0%") for grid, cell in cells}
        section.table(pivot("model, drafter, data", texts), f"By batch size, {label}:")
        medians = [{cell.batch_size: cell.spread(name).median for cell in grid.cells} for grid in found]
        lines = coloured(dict(zip(short_names(found), medians, strict=True)))
        if name == "padding_per_new_token":
            for index, drafter in enumerate(("llma", "draft_model"), 4):
                quoted = {each.batch_size: each.share for each in paper.PADDING if each.drafter == drafter}
                lines.append(Curve(f"paper quotes, {drafter} (above)", quoted, colour(None, index), "marks"))
        mark = marks(row for grid in found for row in grid.rows)
        charts.append(curves(label, "batch size / rows", label, lines, mark=mark))
    section.draw("Padding per new token; stars, what the paper quotes", charts[0])
    section.draw("Padding ratio of the paper's appendix", charts[1])


_PANELS = {
    "tau_max": ("longest acceptance of a step", "E(τ_max) / tokens"),
    "padding_length": ("padding length", "E(δ̄) / tokens"),
    "padding_ratio": ("padding ratio", "E(δ̄ / τ_max)"),
}


def appendix(section: Section, simulations: list[Simulation]) -> None:
    """Appendix B: the three panels, and the expected padding ratio."""
    (simulation,) = simulations
    for name, (label, ylabel) in _PANELS.items():
        lines: dict[str, dict[float, Spread]] = {}
        for point in sorted(simulation.points, key=lambda point: point.batch_size):
            mean, error = (point.simulated[name][part] for part in ("mean", "error"))
            spread = Spread(point.exact[name], mean - 3 * error, mean + 3 * error, 1)
            lines.setdefault(f"b = {point.batch_size}", {})[point.p] = spread
        svg = curves(label, "p, accuracy of the next drafted token", ylabel, coloured(lines, "level"), log=False)
        section.draw(f"Expected {label} by p and batch size; bars, simulated batches ±3 standard errors", svg)
    said = "Expected padding ratio E(δ̄/τ_max) by p and batch size, closed form:"
    section.table(expected_ratio(simulation), said)


def expected_ratio(simulation: Simulation) -> Table:
    """The closed form of the padding ratio by p and batch size."""
    points = sorted(simulation.points, key=lambda point: (point.p, point.batch_size))
    return pivot(
        "p",
        {(f"{each.p:g}", f"b = {each.batch_size}"): f"{each.exact['padding_ratio']:.1%}" for each in points},
    )
