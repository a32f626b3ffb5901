"""How far samples differ in what is accepted, the least of a batch, and acceptance at each place of a draft."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from emssd.report.cells import Grid, grids
from emssd.report.figures import Curve, colour, curves, histograms
from emssd.report.sections.common import Plot, Section, begin, caveat, short_names
from emssd.report.sources import Material
from emssd.report.text import escape

__all__ = ["acceptance", "accepted_by_position", "least_of_batches"]

_BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32)


def acceptance(material: Material) -> Section | None:
    """The acceptance length figure, and acceptance by place in the draft."""
    rows = [row for row in material.of("acceptance") if row.speculate]
    if not rows:
        return None
    claim = (
        "The paper says that samples differ considerably in their mean acceptance length, with LLMA more for "
        "OPT-2.7b and OPT-13b than for OPT-6.7b, with a draft model about equally; and that the least of a batch, "
        "which falls with the batch size, says best how far the batch is accelerated."
    )
    section = begin("acceptance", "Acceptance by sample", claim, (row.provenance for row in rows))
    found = grids(rows)
    for grid in found:
        section.say(caveat(grid))
    names = short_names(found)
    samples = {name: grid.rows[0].samples["acceptance_length"] for name, grid in zip(names, found, strict=True)}
    least = {name: least_of_batches(taus) for name, taus in samples.items()}
    _spread_table(section, samples, least)
    mark = ", ".join(dict.fromkeys(grid.mark for grid in found if grid.mark))
    lines = [
        Curve(name, {float(b): tau for b, tau in taus.items()}, colour(None, index))
        for index, (name, taus) in enumerate(least.items())
    ]
    tau = "mean acceptance length τ of a sample / tokens"
    shown = [
        Plot("acceptance_samples", "Density of the samples' mean acceptance length",
             histograms("Samples", tau, samples, mark=mark)),
        Plot("acceptance_least", "Least mean acceptance length within a batch, by batch size",
             curves("Least of a batch", "batch size / rows", "mean of the least τ / tokens", lines, mark=mark)),
    ]  # fmt: skip
    section.plots(
        shown, "Each sample's mean τ; the least of consecutive full batches." + (f" **{mark}**." if mark else "")
    )
    _positions(section, found, mark)
    return section


def least_of_batches(taus: Seq[float]) -> dict[int, float]:
    """Mean over consecutive full batches, by batch size, of the least of the batch; rows left over are left out."""
    found = {}
    for size in _BATCHES:
        batches = [taus[i : i + size] for i in range(0, len(taus) - size + 1, size)]
        if batches:
            found[size] = statistics.mean(map(min, batches))
    return found


def accepted_by_position(acceptance: Mapping[str, int], drafted: Mapping[str, int]) -> dict[int, float]:
    """Of the drafts that have a token at place j (from 1), the share whose tokens 1 to j were all accepted.

    Row-steps with τ > j accepted j tokens at least, so this is their number ÷ that of drafts of at least j tokens.

    Args:
        acceptance: row-steps by τ, the target's own token included.
        drafted: row-steps by number of drafted tokens; chains, no trees.
    """
    longest = max((int(length) for length, count in drafted.items() if count), default=0)
    return {
        j: sum(n for tau, n in acceptance.items() if int(tau) > j) / sum(n for k, n in drafted.items() if int(k) >= j)
        for j in range(1, longest + 1)
    }


def _spread_table(
    section: Section, samples: Mapping[str, Seq[float]], least: Mapping[str, Mapping[int, float]]
) -> None:
    sizes = [size for size in _BATCHES if any(size in values for values in least.values())]
    columns = ["model, drafter, data", "samples", "mean τ", "standard deviation", *(f"least of {b}" for b in sizes[1:])]
    lines = []
    for name, taus in samples.items():
        deviation = statistics.pstdev(taus)
        shown = [f"{least[name][b]:.2f}" if b in least[name] else "" for b in sizes[1:]]
        lines.append([escape(name), str(len(taus)), f"{statistics.mean(taus):.2f}", f"{deviation:.2f}", *shown])
    section.table(columns, lines)
    section.points(_judge(name, taus, least[name]) for name, taus in samples.items())


def _judge(name: str, taus: Seq[float], least: Mapping[int, float]) -> str:
    mean, largest = statistics.mean(taus), max(least)
    share = statistics.pstdev(taus) / mean
    return (
        f"{escape(name)}: samples deviate by {share:.0%} of their mean; the least of {largest} is "
        f"{least[largest]:.2f}, {least[largest] / mean:.0%} of the mean, which bounds what a static batch of rows of "
        "one length gains."
    )


def _positions(section: Section, found: Seq[Grid], mark: str) -> None:
    shares = {}
    for grid, name in zip(found, short_names(found), strict=True):
        metrics = grid.rows[0].metrics
        by_place = accepted_by_position(metrics["acceptance_histogram"], metrics["draft_length_histogram"])
        if by_place:
            shares[name] = by_place
    if not shares:
        return
    section.head("By place in the draft")
    section.say(
        "Of the drafts that have a j-th token, the share in which it was accepted, and with it all before it: "
        "row-steps with τ > j ÷ row-steps that verified at least j drafted tokens (drafts as chains)."
    )
    places = sorted({place for by_place in shares.values() for place in by_place})
    section.table(
        ["model, drafter, data", *map(str, places)],
        ([escape(name), *(f"{v[j]:.0%}" if j in v else "" for j in places)] for name, v in shares.items()),
    )
    lines = [
        Curve(name, {float(j): share for j, share in v.items()}, colour(None, i))
        for i, (name, v) in enumerate(shares.items())
    ]
    svg = curves(
        "Accepted, by place in the draft", "place j", "share of drafts that reach j", lines, mark=mark, log=False
    )
    section.plots(
        [Plot("acceptance_places", "Accepted share by place in the draft", svg)], f"**{mark}**." if mark else ""
    )
