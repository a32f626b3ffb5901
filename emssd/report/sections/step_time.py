"""The inference time figure: the time of a step by tokens per sample and batch size."""

from __future__ import annotations

from collections.abc import Iterable

from emssd.report import paper
from emssd.report.cells import Grid, Line, Setting, Spread, grids
from emssd.report.figures import Curve, colour, curves
from emssd.report.floor import Floor
from emssd.report.rows import Row
from emssd.report.sections.common import Section, begin
from emssd.report.sources import Material
from emssd.report.tables import Table, escape, grouped

__all__ = ["step_table", "step_time", "steps_of"]

_QUOTED = 5  # tokens per sample that the paper compares with one
_QUOTED_SIZE = 16  # at this batch size


def step_time(material: Material) -> Section | None:
    """Median times of steps, which have as many tokens as is said where drafts are wrong throughout."""
    rows = material.of("step_time")
    found = steps_of(rows)
    if not found:
        return None
    claim = (
        f"In the paper a step of OPT-6.7b with {_QUOTED_SIZE} rows behind 512 tokens takes {paper.STEP_MS[1]} ms for "
        f"one token per row and {paper.STEP_MS[_QUOTED]} ms for {_QUOTED}; with 4 rows both take essentially as long. "
        "Here: median ms of a step by batch size and tokens per row."
    )
    section = begin("step_time", "Time of a step by tokens per sample", claim, rows)
    for grid in found:
        lengths = [int(length) for row in grid.rows for length in row.samples["num_prompt_tokens"]]
        longest = max(float(row.metrics["mean_acceptance_length"]) for row in grid.rows)
        section.say(f"### {escape(grid.title)}")
        section.say(
            f"Prompts of {min(lengths)} to {max(lengths)} tokens; the largest mean acceptance length of a run is "
            f"{longest:.2f} (1.00: every draft is wrong)."
        )
        section.table(step_table(grid))
        svg = curves(grid.title, "tokens per sample in a step", "ms per step", _curves(grid), mark=grid.mark, log=False)
        section.draw(f"Milliseconds of a step by tokens per sample, and dotted its floor: {grid.title}", svg)
    return section


def steps_of(rows: Iterable[Row]) -> list[Grid]:
    """A grid for each setting and line, whatever is drafted at a time.

    Prompts that are as many as the rows of the batch do not tell settings apart.
    """

    def undrafted(row: Row) -> Setting:
        name, _, options = row.drafter_options.removesuffix(")").partition("(")
        kept = [each for each in options.split(", ") if each and not each.startswith("num_speculative_tokens=")]
        drafter = f"{name}({', '.join(kept)})" if kept else name
        return Setting.of(row)._replace(drafter=f"{drafter}, {Line.of(row).label}")

    def without_prompts(row: Row) -> Setting:
        return undrafted(row)._replace(data=row.data_label or row.data, length="")

    timed = [row for row in rows if row.metrics["decode_row_steps"]]
    follow = {
        setting
        for setting, mine in grouped(timed, without_prompts).items()
        if all(len(row.samples["num_prompt_tokens"]) == row.batch_size for row in mine)
    }
    return grids(timed, lambda row: each if (each := without_prompts(row)) in follow else undrafted(row))


def step_table(grid: Grid) -> Table:
    """Milliseconds by batch size and tokens per sample, how much longer several tokens take than one, and the floor."""
    quoted = f"{paper.STEP_MS[_QUOTED] / paper.STEP_MS[1]:.2f}"
    lines = []
    for cell in grid.cells:
        by_tokens = grouped(cell.rows, _tokens)
        for count, rows in sorted(by_tokens.items()):
            ratio = Spread.within_repeats(rows, by_tokens.get(1, ()), _ms) if count > 1 else None
            printed = quoted if (cell.batch_size, count) == (_QUOTED_SIZE, _QUOTED) else ""
            floor = Floor.of(rows[0], count)
            figures = [Spread.of(map(_ms, rows)).text(), ratio.text() if ratio else "", printed]
            lines.append([str(cell.batch_size), str(count), *figures, f"{1e3 * floor.seconds:.2f} ({floor.bound})"])
    return Table(["batch", "tokens", "ms / step", "÷ 1 token", "paper", "floor, ms"], lines, left=2)


def _tokens(row: Row) -> int:
    """Tokens that a row of the batch has in a step: those drafted and the newest.

    The mean is less: what a row drafts is cut where it has less than that left to generate.
    """
    return 1 + max((int(length) for length, count in row.metrics["draft_length_histogram"].items() if count), default=0)


def _ms(row: Row) -> float:
    return 1e3 * float(row.metrics["median_decode_step_seconds"])


def _curves(grid: Grid) -> list[Curve]:
    lines = []
    for index, cell in enumerate(grid.cells):
        by_tokens = sorted(grouped(cell.rows, _tokens).items())
        times = {float(count): Spread.of(map(_ms, rows)) for count, rows in by_tokens}
        floors = {float(count): 1e3 * Floor.of(rows[0], count).seconds for count, rows in by_tokens}
        lines.append(Curve(f"batch {cell.batch_size}", times, colour(None, index)))
        lines.append(Curve("", floors, colour(None, index), "floor"))
    return lines
