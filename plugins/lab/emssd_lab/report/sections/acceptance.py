"""Acceptance by sample, by batch, and by place in a draft; and the waste of aligning a batch, measured and expected."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import pandas as pd

from emssd_lab.report.cells import Spread, grids, marks
from emssd_lab.report.figures import coloured, curves, histograms
from emssd_lab.report.rows import Simulation
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import Table, pivot

__all__ = ["acceptance", "appendix", "expected_ratio", "padding_ratio"]

_BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32)


def acceptance(section: Section, rows: pd.DataFrame) -> None:
    """Mean τ by sample, the least of a batch, and acceptance by place in a draft."""
    drafted = rows[rows.speculate]
    if drafted.empty:
        return
    first = {grid.title: grid.rows.row.iloc[0] for grid in grids(drafted)}
    samples = {name: row.samples.acceptance_length for name, row in first.items()}
    least = {name: _least_of_batches(taus) for name, taus in samples.items()}
    texts = _texts(least, "least of {}", ".2f")
    texts.insert(0, "samples", [str(len(taus)) for taus in samples.values()])
    texts.insert(1, "mean τ", [f"{np.mean(taus):.2f}" for taus in samples.values()])
    texts.insert(2, "standard deviation", [f"{np.std(taus):.2f}" for taus in samples.values()])
    section.table(Table.of(texts.reset_index(names="model, drafter, data")))
    title = "Mean acceptance length τ of each sample"
    section.draw(title, histograms(title, "τ / tokens", samples, mark=marks(drafted)))
    shares = {}
    for name, row in first.items():
        depths = row.metrics.draft_depth_histogram or row.metrics.draft_length_histogram
        shares[name] = _accepted_by_position(row.metrics.acceptance_histogram, depths)
    if any(shares.values()):
        section.say("### By place in the draft")
        section.say("The share of drafts of at least j tokens one after another of which j were accepted.")
        section.table(Table.of(_texts(shares, "{}", ".0%").reset_index(names="model, drafter, data")))


def _texts(figures: Mapping[str, Mapping[int, float]], column: str, form: str) -> pd.DataFrame:
    """A line for each name, with a column for each number that some name has a figure for, from the smallest."""
    frame = pd.DataFrame.from_dict(figures, orient="index").sort_index(axis=1)
    texts = frame.map(lambda value: "" if pd.isna(value) else f"{value:{form}}")
    return texts.rename(columns=column.format)


def _least_of_batches(taus: Seq[float]) -> dict[int, float]:
    """Mean over consecutive full batches of the least of the batch, by batch size; rows left over are left out."""
    full = {size: np.asarray(taus[: len(taus) // size * size]).reshape(-1, size) for size in _BATCHES}
    return {size: float(batches.min(axis=1).mean()) for size, batches in full.items() if len(batches)}


def _accepted_by_position(acceptance: Mapping[int, int], drafted: Mapping[int, int]) -> dict[int, float]:
    """The share of drafts with a token at depth j (from 1) of which j tokens were accepted.

    Row-steps with τ > j accepted j tokens at least, so this is their number ÷ that of drafts at least j deep.

    Args:
        acceptance: row-steps by τ, the target's own token included.
        drafted: row-steps by depth of the drafted tree; of a chain, its length.
    """
    longest = max((length for length, count in drafted.items() if count), default=0)
    return {
        j: sum(n for tau, n in acceptance.items() if tau > j) / sum(n for depth, n in drafted.items() if depth >= j)
        for j in range(1, longest + 1)
    }


def padding_ratio(section: Section, rows: pd.DataFrame) -> None:
    """Both padding ratios by batch size."""
    vanilla = rows[rows.method == "vanilla"].sort_values("batch_size", kind="stable")
    if vanilla.empty:
        return
    titles = {grid.setting: grid.title for grid in grids(vanilla)}
    section.say(
        "*Padding per new token* is that of the paper's code: (padding tokens fed + KV slots lost) ÷ new tokens of "
        "decode steps. *δ̄/τ_max* is that of its appendix: by which share the rows' mean acceptance is shorter than the "
        "longest, as a mean of decode steps."
    )
    for column, label in (("padding_per_new_token", "padding per new token"), ("padding_ratio", "δ̄/τ_max")):
        medians = vanilla.groupby(["setting", "batch_size"], sort=False)[column].median()
        texts = {(titles[setting], str(size)): f"{value:.0%}" for (setting, size), value in medians.items()}
        section.table(pivot("model, drafter, data", texts), f"By batch size, {label}:")


_PANELS = {
    "tau_max": ("longest acceptance of a step", "E(τ_max) / tokens"),
    "padding_length": ("padding length", "E(δ̄) / tokens"),
    "padding_ratio": ("padding ratio", "E(δ̄ / τ_max)"),
}


def appendix(section: Section, simulation: Simulation) -> None:
    """Appendix B: the three panels, and the expected padding ratio."""
    for name, (label, ylabel) in _PANELS.items():
        lines: dict[str, dict[float, Spread]] = {}
        for point in sorted(simulation.points, key=lambda point: point.batch_size):
            mean, error = (point.simulated[name][part] for part in ("mean", "error"))
            spread = Spread(point.exact[name], mean - 3 * error, mean + 3 * error, 1)
            lines.setdefault(f"b = {point.batch_size}", {})[point.p] = spread
        svg = curves(label, "p, accuracy of the next drafted token", ylabel, coloured(lines, "level"), log=False)
        section.draw(f"Expected {label} by p and batch size; bars, simulated batches ±3 standard errors", svg)
    above = "Expected padding ratio E(δ̄/τ_max) by p and batch size, closed form:"
    section.table(expected_ratio(simulation), above)


def expected_ratio(simulation: Simulation) -> Table:
    """The closed form of the padding ratio by p and batch size."""
    points = sorted(simulation.points, key=lambda point: (point.p, point.batch_size))
    ratios = {(f"{point.p:g}", f"b = {point.batch_size}"): point.exact["padding_ratio"] for point in points}
    return pivot("p", {cell: f"{value:.1%}" for cell, value in ratios.items()})
