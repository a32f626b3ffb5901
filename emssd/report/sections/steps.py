"""The time of a step: where it goes, its floor, and how it grows with the tokens of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil

from emssd.model.costs import Costs
from emssd.report import paper
from emssd.report.cells import WITHOUT_BASELINE, Cell, Grid, Line, Setting, Spread, grids
from emssd.report.figures import Curve, colour, curves, stacked
from emssd.report.rows import Row, per
from emssd.report.sections.common import CELL, About, Section
from emssd.report.tables import Table, escape, grouped, table_of

__all__ = ["STEP_TIME", "Floor", "step_table", "steps_of", "time_of_steps"]

_QUOTED = 5  # tokens per sample that the paper compares with one
_QUOTED_SIZE = 16  # at this batch size


@dataclass(frozen=True, slots=True)
class Floor:
    """Of a mean decode step of one run; a draft model's own work is not in it.

    Attributes:
        byte_seconds: weights and the rows' KV moved once, at the measured bandwidth.
        flop_seconds: the arithmetic of all computed tokens, at the measured rate of a large product.
        tokens_per_step: new tokens of a step.
    """

    byte_seconds: float
    flop_seconds: float
    tokens_per_row: float
    tokens_per_step: float

    @classmethod
    def of(cls, row: Row, tokens_per_row: float | None = None) -> Floor:
        """Of a run that had decode steps, as it was or with another number of tokens per row."""
        metrics, hardware = row.metrics, row.provenance["hardware"]
        steps, num_rows = metrics["decode_steps"], metrics["decode_row_steps"] / metrics["decode_steps"]
        tokens = tokens_per_row or metrics["decode_computed_tokens"] / metrics["decode_row_steps"]
        moved, flops = Costs(**row.costs).of_step(num_rows, num_rows * tokens, metrics["decode_kv_tokens"] / steps)
        seconds = moved / hardware["bytes_per_second"], flops / hardware["flops_per_second"]
        return cls(*seconds, tokens, metrics["decode_new_tokens"] / steps)

    @property
    def seconds(self) -> float:
        """Of a step: the two overlap at best."""
        return max(self.byte_seconds, self.flop_seconds)

    @property
    def bound(self) -> str:
        """The limiting resource: ``bytes`` or ``FLOPs``."""
        return "FLOPs" if self.flop_seconds >= self.byte_seconds else "bytes"

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second at the floor."""
        return self.tokens_per_step / self.seconds

    @property
    def arithmetic_from(self) -> int:
        """From how many tokens per row on arithmetic takes longer than memory."""
        return max(1, ceil(self.byte_seconds * self.tokens_per_row / self.flop_seconds))


def time_of_steps(rows: list[Row]) -> Section | None:
    """Milliseconds of a decode step by phase, and tokens/s beside their floor."""
    left_out = (*WITHOUT_BASELINE, "drafters")  # drafters side by side are so many that nobody would read them
    rows = [row for row in rows if row.experiment not in left_out and row.metrics["decode_row_steps"]]
    if not rows:
        return None
    claim = (
        "Milliseconds of a mean decode step by phase; tokens/s are tokens per row and step × rows per step ÷ time. The "
        "floor is the larger of two times: reading the weights and the rows' KV once at the measured bandwidth, and "
        "computing all tokens at the measured rate of a large product; a draft model's work is not in it."
    )
    section = Section("time", "Where the time of a step goes, and its floor", [claim])
    section.warn_if_busy(*(row.metrics for row in rows))
    by_experiment = grouped(rows, lambda row: row.experiment)
    for experiment, grid in ((name, grid) for name, mine in by_experiment.items() for grid in grids(mine)):
        section.head(grid, f"{experiment}: ")
        names = list(grid.rows[0].metrics["decode_seconds"])
        section.table(table_of(grid.cells, CELL | _columns(names), left=2))
        parts = {name: [cell.spread(partial(_ms, name)).median for cell in grid.cells] for name in names}
        labels = [f"{cell.batch_size} {cell.line.label}" for cell in grid.cells]
        svg = stacked(grid.title, "ms per decode step", parts, labels, mark=grid.mark)
        section.draw(f"Milliseconds of a step by phase: {grid.title}", svg)
    return section


def _columns(names: list[str]) -> dict[str, Callable[[Cell], str]]:
    figures: dict[str, Callable[[Row], float]] = {
        "tokens / row and step": per("decode_new_tokens", "decode_row_steps"),
        "rows / step": per("decode_row_steps", "decode_steps"),
        "ms / step": lambda row: sum(_ms(name, row) for name in names),
    }
    figures |= {name: partial(_ms, name) for name in names}
    figures |= {
        "floor, ms": lambda row: 1e3 * Floor.of(row).seconds,
        "× floor": lambda row: Floor.of(row).tokens_per_second / row.rate,
    }
    return {name: partial(Cell.median, figure=figure) for name, figure in figures.items()} | {
        "floor bound by": lambda cell: " or ".join(dict.fromkeys(Floor.of(row).bound for row in cell.rows)),
        "by FLOPs from, tokens / row": lambda cell: str(Floor.of(cell.rows[0]).arithmetic_from),
    }


def _ms(phase: str, row: Row) -> float:
    return float(1e3 * row.metrics["decode_seconds"][phase] / row.metrics["decode_steps"])


def _step_time(section: Section, rows: list[Row]) -> None:
    """Median times of steps, which have as many tokens as is said where drafts are wrong throughout."""
    for grid in steps_of(rows):
        lengths = [int(length) for row in grid.rows for length in row.samples["num_prompt_tokens"]]
        longest = max(float(row.metrics["mean_acceptance_length"]) for row in grid.rows)
        section.say(f"### {escape(grid.title)}")
        section.say(
            f"Prompts of {min(lengths)} to {max(lengths)} tokens; the largest mean acceptance length of a run is "
            f"{longest:.2f} (1.00: every draft is wrong)."
        )
        section.table(step_table(grid))
        svg = curves(
            grid.title, "tokens per sample in a step", "ms per step", _step_curves(grid), mark=grid.mark, log=False
        )
        section.draw(f"Milliseconds of a step by tokens per sample, and dotted its floor: {grid.title}", svg)


STEP_TIME = About(
    "step_time",
    "Time of a step by tokens per sample",
    f"In the paper a step of OPT-6.7b with {_QUOTED_SIZE} rows behind 512 tokens takes {paper.STEP_MS[1]} ms for "
    f"one token per row and {paper.STEP_MS[_QUOTED]} ms for {_QUOTED}; with 4 rows both take essentially as long. "
    "Here: median ms of a step by batch size and tokens per row.",
    _step_time,
)


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
            ratio = Spread.within_repeats(rows, by_tokens.get(1, ()), _median_ms) if count > 1 else None
            printed = quoted if (cell.batch_size, count) == (_QUOTED_SIZE, _QUOTED) else ""
            floor = Floor.of(rows[0], count)
            figures = [Spread.of(map(_median_ms, rows)).text(), ratio.text() if ratio else "", printed]
            lines.append([str(cell.batch_size), str(count), *figures, f"{1e3 * floor.seconds:.2f} ({floor.bound})"])
    return Table(["batch", "tokens", "ms / step", "÷ 1 token", "paper", "floor, ms"], lines, left=2)


def _tokens(row: Row) -> int:
    """Tokens that a row of the batch has in a step: those drafted and the newest.

    The mean is less: what a row drafts is cut where it has less than that left to generate.
    """
    return 1 + max((int(length) for length, count in row.metrics["draft_length_histogram"].items() if count), default=0)


def _median_ms(row: Row) -> float:
    return 1e3 * float(row.metrics["median_decode_step_seconds"])


def _step_curves(grid: Grid) -> list[Curve]:
    lines = []
    for index, cell in enumerate(grid.cells):
        by_tokens = sorted(grouped(cell.rows, _tokens).items())
        times = {count: Spread.of(map(_median_ms, rows)) for count, rows in by_tokens}
        floors = {count: 1e3 * Floor.of(rows[0], count).seconds for count, rows in by_tokens}
        lines.append(Curve(f"batch {cell.batch_size}", times, colour(None, index)))
        lines.append(Curve("", floors, colour(None, index), "floor"))
    return lines
