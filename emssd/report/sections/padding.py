"""Sections on what aligning a batch wastes: measured by batch size, and expected by the paper's appendix."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.report import paper
from emssd.report.cells import Grid, Spread, grids
from emssd.report.figures import Curve, colour, coloured, curves
from emssd.report.rows import Row, Simulation
from emssd.report.sections.common import About, Section, begin, marks_of, short_names
from emssd.report.tables import Table, escape, pivot

__all__ = ["PADDING_RATIO", "appendix", "expected_ratio"]

_RATIOS = {"padding_per_new_token": "padding per new token", "padding_ratio": "δ̄/τ_max"}
_PANELS = {
    "tau_max": ("longest acceptance of a step", "E(τ_max) / tokens"),
    "padding_length": ("padding length", "E(δ̄) / tokens"),
    "padding_ratio": ("padding ratio", "E(δ̄ / τ_max)"),
}


def _padding_ratio(section: Section, rows: list[Row]) -> None:
    if not (found := grids(row for row in rows if row.method == "vanilla")):
        return
    section.say(
        "*Padding per new token* is that of the paper's code: (padding tokens fed + KV slots lost) ÷ new tokens of "
        "decode steps. *δ̄/τ_max* is that of its appendix: by which share the rows' mean acceptance is shorter than the "
        "longest, as a mean of decode steps."
    )
    for name, label in _RATIOS.items():
        cells = sorted(((grid, cell) for grid in found for cell in grid.cells), key=lambda each: each[1].batch_size)
        texts = {(grid.title, str(cell.batch_size)): cell.median(name, ".0%") for grid, cell in cells}
        section.say(f"By batch size, {label}:")
        section.table(pivot("model, drafter, data", texts))
    section.draw("Padding per new token; stars, what the paper quotes", _chart(found, "padding_per_new_token"))
    section.draw("Padding ratio of the paper's appendix", _chart(found, "padding_ratio"))


_quoted = "; ".join(
    f"above {each.share:.0%} with {paper.label(each.model)}, {each.drafter}, batch size {each.batch_size}"
    for each in paper.PADDING
)
PADDING_RATIO = About(
    "padding_ratio",
    "Padding of the vanilla method",
    f"The paper quotes padding ratios of the vanilla method: {_quoted}.",
    _padding_ratio,
)


def _chart(found: Seq[Grid], name: str) -> str:
    medians = [{cell.batch_size: cell.spread(name).median for cell in grid.cells} for grid in found]
    lines = coloured(dict(zip(short_names(found), medians, strict=True)))
    if name == "padding_per_new_token":
        for index, drafter in enumerate(("llma", "draft_model"), 4):
            quoted = {each.batch_size: each.share for each in paper.PADDING if each.drafter == drafter}
            lines.append(Curve(f"paper quotes, {drafter} (above)", quoted, colour(None, index), "marks"))
    label = _RATIOS[name]
    return curves(label, "batch size / rows", label, lines, mark=marks_of(found))


def appendix(simulations: Iterable[Simulation]) -> list[Section]:
    """Appendix B: the three panels, and the expected padding ratio."""
    found = []
    for index, each in enumerate(simulations):
        claim = (
            "In the paper's simulation the longest acceptance and the padding grow with p, the accuracy of a drafted "
            "token, and with the batch size; the padding ratio falls with p, and exceeds 50 % below p = 0.8 and above "
            "batch size 8."
        )
        title = escape(f"Appendix: expected padding, τ at most {each.max_acceptance}")
        section = begin(f"appendix_{index}", title, claim, [each])
        for name, (label, ylabel) in _PANELS.items():
            svg = curves(label, "p, accuracy of the next drafted token", ylabel, _panel(each, name), log=False)
            section.draw(f"Expected {label} by p and batch size; bars, simulated batches ±3 standard errors", svg)
        section.say("Expected padding ratio E(δ̄/τ_max) by p and batch size, closed form:")
        section.table(expected_ratio(each))
        found.append(section)
    return found


def expected_ratio(simulation: Simulation) -> Table:
    """The closed form of the padding ratio by p and batch size."""
    points = sorted(simulation.points, key=lambda point: (point["p"], point["batch_size"]))
    return pivot(
        "p",
        {(f"{each['p']:g}", f"b = {each['batch_size']}"): f"{each['exact']['padding_ratio']:.1%}" for each in points},
    )


def _panel(simulation: Simulation, name: str) -> list[Curve]:
    lines: dict[str, dict[float, Spread]] = {}
    for point in sorted(simulation.points, key=lambda point: point["batch_size"]):
        mean, error = (float(point["simulated"][name][part]) for part in ("mean", "error"))
        spread = Spread(float(point["exact"][name]), mean - 3 * error, mean + 3 * error, 1)
        lines.setdefault(f"b = {point['batch_size']}", {})[float(point["p"])] = spread
    return coloured(lines, "level")
