"""Acceptance by sample, by batch, and by place in a draft."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

from emssd.report.cells import grids
from emssd.report.figures import coloured, curves, histograms
from emssd.report.rows import Row
from emssd.report.sections.common import About, Section, marks_of, short_names
from emssd.report.tables import table_of

__all__ = ["ACCEPTANCE", "accepted_by_position", "least_of_batches"]

_BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32)
_Figures = Mapping[str, Mapping[int, float]]  # by name, and batch size or place


def _acceptance(section: Section, rows: list[Row]) -> None:
    if not (found := grids(row for row in rows if row.speculate)):
        return
    mark, by_name = marks_of(found), {name: grid.rows[0] for name, grid in zip(short_names(found), found, strict=True)}
    samples = {name: row.samples["acceptance_length"] for name, row in by_name.items()}
    least = {name: least_of_batches(taus) for name, taus in samples.items()}
    columns: dict[str, Callable[[str], str]] = {
        "model, drafter, data": str,
        "samples": lambda name: str(len(samples[name])),
        "mean τ": lambda name: f"{statistics.mean(samples[name]):.2f}",
        "standard deviation": lambda name: f"{statistics.pstdev(samples[name]):.2f}",
    }
    section.table(table_of(by_name, columns | _columns(least, "least of {}", ".2f")))
    title = "Mean acceptance length τ of each sample"
    section.draw(title, histograms(title, "τ / tokens", samples, mark=mark))
    title = "Least τ of a batch, mean of consecutive full batches"
    section.draw(title, curves(title, "batch size / rows", "least τ / tokens", coloured(least), mark=mark))
    shares = {
        name: accepted_by_position(
            row.metrics["acceptance_histogram"],
            row.metrics.get("draft_depth_histogram", row.metrics["draft_length_histogram"]),
        )
        for name, row in by_name.items()
    }
    if any(shares.values()):
        section.say("### By place in the draft")
        section.say("The share of drafts of at least j tokens one after another of which j were accepted.")
        section.table(table_of(by_name, {"model, drafter, data": str} | _columns(shares, "{}", ".0%")))
        title, ylabel = "Accepted, by place in the draft", "share of drafts that reach j"
        section.draw(title, curves(title, "place j", ylabel, coloured(shares), mark=mark, log=False))


ACCEPTANCE = About(
    "acceptance",
    "Acceptance by sample",
    "The paper says that samples differ considerably in their mean acceptance length τ, and that the least of a "
    "batch, which falls with the batch size, says best how far a batch is accelerated.",
    _acceptance,
)


def least_of_batches(taus: Seq[float]) -> dict[int, float]:
    """Mean over consecutive full batches of the least of the batch, by batch size; rows left over are left out."""
    found = {}
    for size in _BATCHES:
        batches = [taus[i : i + size] for i in range(0, len(taus) - size + 1, size)]
        if batches:
            found[size] = statistics.mean(map(min, batches))
    return found


def accepted_by_position(acceptance: Mapping[str, int], drafted: Mapping[str, int]) -> dict[int, float]:
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


def _columns(figures: _Figures, column: str, form: str) -> dict[str, Callable[[str], str]]:
    """A column for each number that some name has a figure for, from the smallest."""

    def text(place: int, name: str) -> str:
        return format(figures[name][place], form) if place in figures[name] else ""

    places = sorted({place for values in figures.values() for place in values})
    return {column.format(place): partial(text, place) for place in places}
