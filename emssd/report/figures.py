"""Plots of a report, as SVG. They need matplotlib: ``pip install "emssd[plots]"``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emssd.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curve", "colour", "curves", "histograms", "stacked"]

_COLOURS = {  # told apart by the colour-blind, too
    "vanilla": "#d55e00",
    "unpad_kv": "#e69f00",
    "unpad_inputs": "#cc79a7",
    "unpad_both": "#0072b2",
    "ragged": "#009e73",
    "flashinfer": "#009e73",
    "greedy": "#555555",
    "ragged_greedy": "#8a8a8a",
    "flashinfer_greedy": "#8a8a8a",
}
_CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#555555")
_MARKERS = "osD^vP*X"
_PHASES = {
    "schedule": "#e69f00", "draft": "#cc79a7", "plan": "#56b4e9", "forward": "#0072b2", "verify": "#009e73",
    "other": "#999999",
}  # fmt: skip
_SHORT = 30  # characters of a legend's entry of which two stand side by side
_SIZE = (5.2, 3.7)  # inches; narrow enough to be read on a phone
_SETTINGS: Any = {"svg.hashsalt": "emssd", "svg.fonttype": "none", "font.size": 9.5, "axes.titlesize": 10.5}


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot.

    Attributes:
        points: y by x.
        ranges: least and greatest y by x, drawn as bars; empty for none.
        style: ``measured`` (marks and a line), ``paper`` (dashed), ``floor`` (dotted), ``marks`` (no line) or ``level``
            (thin).
        colour: of the line.
    """

    label: str
    points: Mapping[float, float]
    colour: str
    style: str = "measured"
    ranges: Mapping[float, tuple[float, float]] | None = None


def colour(method: str | None, index: int = 0) -> str:
    """The colour of a method wherever it is shown; of anything else the `index`-th of a cycle."""
    return _COLOURS.get(method or "", _CYCLE[index % len(_CYCLE)])


def curves(
    title: str,
    xlabel: str,
    ylabel: str,
    lines: Seq[Curve],
    *,
    mark: str = "",
    log: bool = True,
    level: float | None = None,
) -> str:
    """Lines over batch sizes or the like.

    Args:
        title, xlabel, ylabel: texts.
        lines: what is drawn.
        mark: what the legend says of all lines: random weights, replay.
        log: x to the base of 2.
        level: a horizontal line there.
    """
    figure, axes = _figure(title)
    for index, line in enumerate(lines):
        _draw(axes, line, _MARKERS[index % len(_MARKERS)])
    if level is not None:
        axes.axhline(level, color="black", linewidth=0.8)
    xs = sorted({x for line in lines for x in line.points})
    if log:
        axes.set_xscale("log", base=2)
    if len(xs) <= 10:
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(bottom=0)
    _legend(figure, axes, mark)
    return _svg(figure)


def _draw(axes: Axes, line: Curve, marker: str) -> None:
    xs = sorted(line.points)
    ys = [line.points[x] for x in xs]
    styles: dict[str, dict[str, Any]] = {
        "measured": {"marker": marker, "ms": 4.5, "linewidth": 1.6},
        "paper": {"linestyle": (0, (4, 2)), "linewidth": 1.2, "alpha": 0.75},
        "floor": {"linestyle": ":", "linewidth": 1.5},
        "marks": {"linestyle": "none", "marker": "*", "ms": 9},
        "level": {"linewidth": 0.9, "marker": marker, "ms": 3},
    }
    axes.plot(xs, ys, color=line.colour, label=line.label, **styles[line.style])
    if line.ranges:
        middles = [(line.ranges[x][0] + line.ranges[x][1]) / 2 for x in xs]
        halves = [(line.ranges[x][1] - line.ranges[x][0]) / 2 for x in xs]
        axes.errorbar(xs, middles, halves, fmt="none", ecolor=line.colour, capsize=2, linewidth=0.9)


def stacked(title: str, xlabel: str, parts: Mapping[str, Seq[float]], labels: Seq[str], *, mark: str = "") -> str:
    """Horizontal bars, each stacked of parts; `parts` has a value for each of `labels`."""
    figure, axes = _figure(title, height=1.3 + 0.21 * len(labels))
    left = [0.0] * len(labels)
    for index, (name, widths) in enumerate(parts.items()):
        fill = _PHASES.get(name, _CYCLE[index % len(_CYCLE)])
        axes.barh(range(len(labels)), list(widths), left=left, label=name, color=fill, height=0.75)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set(xlabel=xlabel)
    _legend(figure, axes, mark, columns=6)
    return _svg(figure)


def histograms(title: str, xlabel: str, samples: Mapping[str, Seq[float]], *, mark: str = "") -> str:
    """Densities of several samples over the same bins."""
    figure, axes = _figure(title)
    lowest = min(min(values) for values in samples.values())
    highest = max(max(values) for values in samples.values())
    step = max((highest - lowest) / 16, 1e-3)
    edges = [lowest + step * i for i in range(18)]
    for index, (name, values) in enumerate(samples.items()):
        style: dict[str, Any] = {"histtype": "stepfilled", "alpha": 0.25, "color": _CYCLE[index % len(_CYCLE)]}
        axes.hist(list(values), edges, density=True, **style)
        axes.hist(list(values), edges, density=True, label=name, **(style | {"histtype": "step", "alpha": 1}))
    axes.set(xlabel=xlabel, ylabel="probability density")
    _legend(figure, axes, mark)
    return _svg(figure)


def _figure(title: str, height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f'a report needs matplotlib ({error}); install it: pip install "emssd[plots]"') from error
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        axes: Axes = figure.subplots()
        axes.set_title(title, wrap=True)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, axes: Axes, mark: str, columns: int = 2) -> None:
    """Below the plot, so that it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if max(map(len, labels), default=0) > _SHORT:
        columns = 1
    if labels:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5, title=mark or None,
            title_fontsize=8, columnspacing=1.2, handlelength=1.8,
        )  # fmt: skip


def _svg(figure: Figure) -> str:
    import matplotlib as mpl

    written = io.StringIO()
    with mpl.rc_context(_SETTINGS):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return written.getvalue()
