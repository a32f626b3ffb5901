"""Plots of simulations. They need matplotlib: ``pip install "emssd[plots]"``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emssd.errors import ConfigError
from emssd.simulate.appendix import QUANTITIES, Point
from emssd.simulate.closed_forms import acceptance_pmf, expected

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_appendix", "draw_policies"]

_LABELS = {
    "tau_max": ("(a) Maximum acceptance length", r"$E(\tau_{max})$ / tokens"),
    "padding_length": ("(b) Average padding length", r"$E(\bar{\delta})$ / tokens"),
    "padding_ratio": ("(c) Average padding ratio", r"$E(\bar{r}) = E(\bar{\delta} / \tau_{max})$"),
}


def draw_appendix(points: Iterable[Point], path: Path, *, max_acceptance: int = 8) -> None:
    """The three panels of the paper's appendix: closed forms as lines, simulations as marks with 3 standard errors.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write to `path`.
    """
    figure, panels = _figure(3)
    points = list(points)
    chances = np.linspace(0.0, 1.0, 101)
    for name, panel in zip(QUANTITIES, panels, strict=True):
        for color, size in enumerate(sorted({point.batch_size for point in points})):
            line = [getattr(expected(acceptance_pmf(p, max_acceptance), size), name) for p in chances]
            panel.plot(chances, line, color=f"C{color}", linewidth=1.2, label=f"b = {size}")
            marks = [point for point in points if point.batch_size == size]
            means = [point.simulated[name].mean for point in marks]
            errors = [3 * point.simulated[name].error for point in marks]
            panel.errorbar([point.p for point in marks], means, errors, fmt="o", ms=3.5, color=f"C{color}", capsize=2)
        title, label = _LABELS[name]
        panel.set(title=title, ylabel=label, xlabel="p, accuracy of the next drafted token", xlim=(0, 1))
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend(title="batch size", frameon=False)
    figure.suptitle(
        f"τ at most {max_acceptance}. Lines: closed form; marks: simulated batches, bars ±3 standard errors",
        fontsize=10,
    )
    _save(figure, path)


def draw_policies(
    rates: Mapping[str, Mapping[str, Seq[tuple[int, float]]]], path: Path, *, title: str, baseline: str
) -> None:
    """Throughput of policies by batch size, as a ratio to one of them, one panel per setting.

    Args:
        rates: by setting and policy, pairs of batch size and tokens/s.
        path: where to write it.
        title: of the figure.
        baseline: the policy that is 1.

    Raises:
        ConfigError: see `draw_appendix`.
    """
    figure, panels = _figure(len(rates))
    for panel, (setting, policies) in zip(panels, rates.items(), strict=True):
        base = dict(policies[baseline])
        for color, (policy, pairs) in enumerate(policies.items()):
            sizes, ratios = zip(*((size, rate / base[size]) for size, rate in pairs), strict=True)
            style: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "ms": 3.5}
            if policy == "adaptive":
                style = {"linewidth": 2.4, "marker": "s", "ms": 5}
            panel.plot(sizes, ratios, color="black" if policy == "adaptive" else f"C{color}", label=policy, **style)
        panel.set(title=setting, xlabel="batch size / rows", ylabel=f"simulated tokens/s, ratio to {baseline}")
        panel.set_xscale("log", base=2)
        ticks = sorted(base)
        panel.set_xticks(ticks, [str(size) for size in ticks], rotation=45)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[-1].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f'plots need matplotlib ({error}); install it: pip install "emssd[plots]"') from error
    figure = Figure(figsize=(4.6 * num_panels, 4.2), dpi=110, layout="constrained")
    return figure, list(np.ravel(figure.subplots(1, num_panels)))


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise ConfigError(f"the plot cannot be written to {path}: {error}; name a .png, .svg or .pdf file") from error
