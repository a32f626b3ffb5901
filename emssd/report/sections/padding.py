"""Sections on what aligning a batch wastes: measured by batch size, and expected by the paper's appendix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from emssd.report import paper
from emssd.report.cells import Grid, grids
from emssd.report.figures import Curve, colour, curves
from emssd.report.rows import Simulation
from emssd.report.sections.common import Plot, Section, begin, caveat, short_names
from emssd.report.sources import Material
from emssd.report.text import escape, listed

__all__ = ["appendix", "padding_ratio"]

_PANELS = {
    "tau_max": ("longest acceptance of a step", "E(τ_max) / tokens"),
    "padding_length": ("padding length", "E(δ̄) / tokens"),
    "padding_ratio": ("padding ratio", "E(δ̄ / τ_max)"),
}


def padding_ratio(material: Material) -> Section | None:
    """The padding ratio figure."""
    rows = [row for row in material.of("padding_ratio") if row.method == "vanilla"]
    if not rows:
        return None
    quoted = "; ".join(
        f"{each.said}{each.share:.0%} with {paper.label(each.model)}, {each.drafter}, {each.data}, batch size "
        f"{each.batch_size}"
        for each in paper.PADDING
    )
    claim = f"The paper quotes padding ratios of the vanilla method: {quoted}."
    section = begin("padding_ratio", "Padding of the vanilla method", claim, (row.provenance for row in rows))
    section.say(
        "There are two definitions. *Padding per new token* is that of the paper's code, and by their size of the "
        "ratios that its text quotes: (padding tokens fed + KV slots lost) ÷ new tokens, decode steps. *δ̄/τ_max* is "
        "that of its appendix (Equation 10): the mean over decode steps of the share by which the rows' mean "
        "acceptance is shorter than the longest; it cannot exceed 1 and counts no input padding."
    )
    found = grids(rows)
    sizes = sorted({size for grid in found for size in grid.batch_sizes})
    for name, label in (("padding_per_new_token", "padding per new token"), ("padding_ratio", "δ̄/τ_max")):
        section.say(f"By batch size, {label}:")
        section.table(
            ["model, drafter, data", *map(str, sizes)],
            ([escape(grid.title), *(_share(grid, size, name) for size in sizes)] for grid in found),
        )
    for grid in found:
        section.say(caveat(grid))
    marks = "; ".join(dict.fromkeys(f"**{grid.mark}**" for grid in found if grid.mark))
    section.plots(
        [
            Plot("padding_ratio_new", "Padding per new token by batch size", _chart(found, "padding_per_new_token")),
            Plot("padding_ratio_tau", "Padding ratio by batch size", _chart(found, "padding_ratio")),
        ],
        "Vanilla method; in the first plot, stars at what the paper quotes" + (f". {marks}." if marks else "."),
    )
    section.points(_judge(grid) for grid in found)
    return section


def _share(grid: Grid, size: int, name: str) -> str:
    cell = grid.get("vanilla", size)
    return "" if cell is None else f"{cell.spread(name).median:.0%}"


def _chart(found: Seq[Grid], name: str) -> str:
    lines = []
    for index, (grid, label) in enumerate(zip(found, short_names(found), strict=True)):
        points = {float(cell.batch_size): cell.spread(name).median for cell in grid.cells}
        lines.append(Curve(label, points, colour(None, index)))
    if name == "padding_per_new_token":
        for index, drafter in enumerate(("llma", "draft_model")):
            quoted = {float(p.batch_size): p.share for p in paper.PADDING if p.drafter == drafter and p.said}
            label = f"paper quotes, {drafter} (above)"
            lines.append(Curve(label, quoted, colour(None, 4 + index), "marks"))
        title, ylabel = "Padding per new token", "padding / new tokens"
    else:
        title, ylabel = "Padding ratio of the appendix", "mean of δ̄ / τ_max"
    marks = ", ".join(dict.fromkeys(grid.mark for grid in found if grid.mark))
    return curves(title, "batch size / rows", ylabel, lines, mark=marks)


def _judge(grid: Grid) -> str:
    """What the paper says at the batch size for which it gives a figure of the same drafter."""
    drafter, said = grid.rows[0].drafter, []
    for quoted in paper.PADDING:
        cell = grid.get("vanilla", quoted.batch_size)
        if cell is None or quoted.drafter != drafter or not quoted.said:
            continue
        here = cell.spread("padding_per_new_token").median
        more = "more" if here > quoted.share else "less"
        said.append(f"{here:.0%} at batch size {quoted.batch_size}, {more} than its {quoted.share:.0%}")
    return f"{escape(grid.title)}: {'; '.join(said) or 'no batch size for which the paper quotes this drafter'}."


def appendix(material: Material) -> list[Section]:
    """Appendix B: the three panels, and the conclusions that the paper draws from them."""
    return [_simulated(each, index) for index, each in enumerate(material.simulations)]


def _simulated(simulation: Simulation, index: int) -> Section:
    claim = (
        "The paper simulates what aligning a batch costs (Appendix B) and concludes: longest acceptance and padding "
        "length grow with p and the batch size; the padding ratio falls with p; below p = 0.8 and above batch size 8 "
        "it exceeds 50 %; and at p = 0.9, 30 % are still wasted."
    )
    title = f"Appendix: expected padding, τ at most {simulation.max_acceptance}"
    section = begin(f"appendix_{index}", title, claim, [simulation.provenance])
    panels = []
    for name, (label, ylabel) in _PANELS.items():
        svg = curves(label, "p, accuracy of the next drafted token", ylabel, _panel(simulation, name), log=False)
        panels.append(Plot(f"appendix_{index}_{name}", f"Expected {label} by p and batch size", svg))
    section.plots(panels, "Lines: closed form. Bars: simulated batches, ±3 standard errors.")
    points = list(simulation.points)
    sizes = sorted({point["batch_size"] for point in points})
    section.say("Expected padding ratio E(δ̄/τ_max), closed form:")
    by_place = {(point["p"], point["batch_size"]): point for point in points}
    chances = sorted({point["p"] for point in points})
    section.table(
        ["p", *(f"b = {size}" for size in sizes)],
        ([f"{p:g}", *(_exact(by_place.get((p, b)), "padding_ratio", ".1%") for b in sizes)] for p in chances),
    )
    section.points(_conclusions(points))
    return section


def _panel(simulation: Simulation, name: str) -> list[Curve]:
    lines = []
    for index, size in enumerate(sorted({point["batch_size"] for point in simulation.points})):
        mine = [point for point in simulation.points if point["batch_size"] == size]
        exact = {float(point["p"]): float(point["exact"][name]) for point in mine}
        estimates = {float(point["p"]): point["simulated"][name] for point in mine}
        ranges = {
            p: (each["mean"] - 3 * each["error"], each["mean"] + 3 * each["error"]) for p, each in estimates.items()
        }
        lines.append(Curve(f"b = {size}", exact, colour(None, index), "level", ranges))
    return lines


def _exact(point: Mapping[str, Any] | None, name: str, form: str) -> str:
    return "" if point is None else format(point["exact"][name], form)


def _conclusions(points: Seq[Mapping[str, Any]]) -> list[str]:
    """Each of the paper's conclusions, checked with the closed forms."""
    said = [_agreement(points)]
    for name, what in (("tau_max", "the longest acceptance"), ("padding_length", "the padding length")):
        falls = _falling(points, name)
        fallen = f"does not grow throughout: it falls towards {_places(falls, points)}"
        said.append(f"With p, {what} {fallen if falls else 'grows throughout'}.")
    rises = _falling(points, "padding_ratio", sign=-1)
    risen = f"does not fall with p throughout: it rises towards {_places(rises, points)}"
    said.append(f"The padding ratio {risen if rises else 'falls with p throughout'}.")
    region = [point for point in points if point["p"] < 0.8 and point["batch_size"] > 8]
    below = [f"{p['exact']['padding_ratio']:.1%} at p = {p['p']:g}, b = {p['batch_size']}" for p in region
             if p["exact"]["padding_ratio"] <= 0.5]  # fmt: skip
    if region:
        said.append(
            f"Below p = 0.8 and above batch size 8, {len(region) - len(below)} of {len(region)} points exceed 50 %"
            + (f"; not so {listed(below)}." if below else ".")
        )
    nine = [point for point in points if abs(point["p"] - 0.9) < 1e-9]
    if nine:
        shown = listed(f"{point['exact']['padding_ratio']:.0%} (b = {point['batch_size']})" for point in nine)
        said.append(f"At p = 0.9 the padding ratio is {shown}.")
    return said


def _falling(points: Seq[Mapping[str, Any]], name: str, sign: int = 1) -> dict[int, list[float]]:
    """By batch size above 1, at which p a quantity is less (with `sign` -1: more) than at the p before."""
    found: dict[int, list[float]] = {}
    for size in sorted({point["batch_size"] for point in points} - {1}):
        mine = sorted((p for p in points if p["batch_size"] == size), key=lambda point: float(point["p"]))
        for left, right in itertools.pairwise(mine):
            if sign * (right["exact"][name] - left["exact"][name]) < 0:
                found.setdefault(size, []).append(right["p"])
    return found


def _places(found: Mapping[int, Seq[float]], points: Seq[Mapping[str, Any]]) -> str:
    """As in ``p = 0.2 to 0.8 (b = 2)``."""
    said = []
    for size, chances in found.items():
        between = {point["p"] for point in points if chances[0] <= point["p"] <= chances[-1]}
        is_run = len(chances) > 2 and len(between) == len(chances)
        shown = f"{chances[0]:g} to {chances[-1]:g}" if is_run else listed(f"{p:g}" for p in chances)
        said.append(f"p = {shown} (b = {size})")
    return "; ".join(said)


def _agreement(points: Seq[Mapping[str, Any]]) -> str:
    far = total = 0
    for point in points:
        for name in _PANELS:
            estimate = point["simulated"][name]
            total += 1
            far += abs(estimate["mean"] - point["exact"][name]) > 3 * estimate["error"] + 1e-12
    return f"Of {total} simulated means, {total - far} lie within 3 standard errors of their closed form."
