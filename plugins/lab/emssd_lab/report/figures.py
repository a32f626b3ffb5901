"""Plots of a report, as SVG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from emssd_lab.report.cells import Spread, methods

__all__ = ["Curve", "colour", "coloured", "curves", "histograms", "speed_chart"]

_CYCLE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#555555", "#882255", "#999933",
    "#44aa99",
)  # fmt: skip
_MARKERS = "osD^vP*"  # as many as have no factor in common with the colours: 77 lines differ in one of the two
_STYLES: dict[str, dict[str, Any]] = {
    "measured": {"ms": 4.5, "linewidth": 1.6},
    "paper": {"marker": "", "linestyle": (0, (4, 2)), "linewidth": 1.2, "alpha": 0.75},
    "floor": {"marker": "", "linestyle": ":", "linewidth": 1.5},
    "level": {"ms": 3, "linewidth": 0.9},
}
_SHORT = 30  # characters of a legend's entry that leave room for two side by side
_SIZE = (5.2, 3.7)  # inches; narrow enough to be read on a phone
_SETTINGS: Any = {"svg.hashsalt": "emssd", "svg.fonttype": "none", "font.size": 9.5, "axes.titlesize": 10.5}

Points = Mapping[Any, float | Spread]
"""y by x; a `Spread` is drawn as its median, with a bar from the least to the greatest."""


class Curve(NamedTuple):
    """A line of a plot, in one of the styles above."""

    label: str
    points: Points
    colour: str
    style: str = "measured"


def colour(method: str | None, index: int = 0) -> str:
    """The colour of a method wherever it is shown; for anything else the `index`-th of a cycle."""
    return methods().get(method or "", {}).get("colour", _CYCLE[index % len(_CYCLE)])


def coloured(lines: Mapping[str, Points], style: str = "measured") -> list[Curve]:
    """A curve for the points of each name, in a colour of its own."""
    return [Curve(name, points, colour(None, index), style) for index, (name, points) in enumerate(lines.items())]


def curves(
    title: str, xlabel: str, ylabel: str, lines: Iterable[Curve], *, mark: str = "", log: bool = True,
    level: float | None = None,
) -> str:  # fmt: skip
    """Lines over batch sizes or the like, under a legend that begins with `mark`: random weights, replay."""
    figure, axes = _figure(title)
    drawn = [line for line in lines if line.points]
    for index, line in enumerate(drawn):
        xs, points = zip(*sorted(line.points.items()), strict=True)
        ys = [y.median if isinstance(y, Spread) else y for y in points]
        style = {"marker": _MARKERS[index % len(_MARKERS)], **_STYLES[line.style]}
        axes.plot(xs, ys, color=line.colour, label=line.label, **style)
        if bars := {x: y for x, y in zip(xs, points, strict=True) if isinstance(y, Spread)}:
            middles = [(y.low + y.high) / 2 for y in bars.values()]
            halves = [(y.high - y.low) / 2 for y in bars.values()]
            axes.errorbar([*bars], middles, halves, fmt="none", ecolor=line.colour, capsize=2, linewidth=0.9)
    if level is not None:
        axes.axhline(level, color="black", linewidth=0.8)
    ticks = sorted({x for line in drawn for x in line.points})
    if log:
        axes.set_xscale("log", base=2)
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(bottom=0)
    return _svg(figure, axes, mark)


def speed_chart(title: str, lines: Iterable[Curve], mark: str = "") -> str:
    """Speed-ups by batch size."""
    return curves(title, "batch size / rows", "speed-up over plain greedy", lines, mark=mark, level=1.0)


def histograms(title: str, xlabel: str, samples: Mapping[str, Seq[float]], *, mark: str = "") -> str:
    """Densities of several samples over the same bins."""
    figure, axes = _figure(title)
    colours = [colour(None, index) for index in range(len(samples))]
    axes.hist([*samples.values()], 16, density=True, histtype="step", color=colours, label=[*samples])
    axes.set(xlabel=xlabel, ylabel="probability density")
    return _svg(figure, axes, mark)


def _figure(title: str) -> tuple[Figure, Axes]:
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes: Axes = figure.subplots()
        axes.set_title(title, wrap=True)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, axes: Axes, mark: str) -> str:
    """The picture, with its legend below the plot, so that it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=1 if max(map(len, labels)) > _SHORT else 2,
            frameon=False, fontsize=8.5, title=mark or None, title_fontsize=8, columnspacing=1.2, handlelength=1.8,
        )  # fmt: skip
    written = io.StringIO()
    with mpl.rc_context(_SETTINGS):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return written.getvalue()
