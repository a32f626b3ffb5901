"""The time of a step: where it goes, its floor, and how it grows with the tokens of each row."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from emssd_lab.report import paper
from emssd_lab.report.cells import WITHOUT_BASELINE, Cell, Grid, Line, Setting, Spread, grids
from emssd_lab.report.figures import Curve, colour, curves, stacked
from emssd_lab.report.rows import Row, per
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import Table, escape, grouped

__all__ = ["step_table", "step_time", "steps_of", "time_of_steps"]


class Floor(NamedTuple):
    """The floor of a mean decode step of one run, without the work of a draft model.

    Attributes:
        byte_seconds: weights and the rows' KV moved once, at the measured bandwidth.
        flop_seconds: the arithmetic of all computed tokens, at the measured rate of a large product.
    """

    byte_seconds: float
    flop_seconds: float
    tokens_per_row: float

    @classmethod
    def of(cls, row: Row, tokens_per_row: float | None = None) -> Floor:
        """The floor of a run that had decode steps, as it was or with another number of tokens per row."""
        metrics, hardware = row.metrics, row.provenance.hardware
        steps, num_rows = metrics.decode_steps, metrics.decode_row_steps / metrics.decode_steps
        tokens = tokens_per_row or metrics.decode_computed_tokens / metrics.decode_row_steps
        moved, flops = row.costs.of_step(num_rows, num_rows * tokens, metrics.decode_kv_tokens / steps)
        return cls(moved / hardware.bytes_per_second, flops / hardware.flops_per_second, tokens)

    @property
    def seconds(self) -> float:
        """Seconds of a step in which the two overlap in full."""
        return max(self.byte_seconds, self.flop_seconds)

    @property
    def bound(self) -> str:
        """The limiting resource: ``bytes`` or ``FLOPs``."""
        return "FLOPs" if self.flop_seconds >= self.byte_seconds else "bytes"

    @property
    def arithmetic_from(self) -> int:
        """From how many tokens per row on arithmetic takes longer than memory."""
        return max(1, ceil(self.byte_seconds * self.tokens_per_row / self.flop_seconds))


def time_of_steps(rows: list[Row]) -> list[Section]:
    """The section of the milliseconds of a decode step by phase, beside its floor, if there are steps."""
    left_out = (*WITHOUT_BASELINE, "drafters")  # drafters side by side are so many that nobody would read them
    rows = [row for row in rows if row.experiment not in left_out and row.metrics.decode_row_steps]
    if not rows:
        return []
    section = Section(
        "time",
        "Where the time of a step goes, and its floor",
        "Milliseconds of a mean decode step by phase; tokens/s are tokens per row and step × rows per step ÷ time. The "
        "floor is the larger of two times: reading the weights and the rows' KV once at the measured bandwidth, and "
        "computing all tokens at the measured rate of a large product; a draft model's work is not in it.",
    )
    section.warn_if_busy(*(row.metrics.other_cpu_share for row in rows))
    for experiment, mine in grouped(rows, lambda row: row.experiment).items():
        for grid in grids(mine):
            section.head(grid, f"{experiment}: ")
            names = list(grid.rows[0].metrics.decode_seconds)
            section.table(Table.of([_phases(cell, names) for cell in grid.cells], left=2))
            parts = {name: [_phase_ms(cell, name) for cell in grid.cells] for name in names}
            labels = [f"{cell.batch_size} {cell.line.label}" for cell in grid.cells]
            svg = stacked(grid.title, "ms per decode step", parts, labels, mark=grid.mark)
            section.draw(f"Milliseconds of a step by phase: {grid.title}", svg)
    return [section]


def _phases(cell: Cell, names: list[str]) -> dict[str, str | None]:
    def over_floor(row: Row) -> float:
        return float(row.metrics.decode_new_tokens / row.metrics.decode_steps / Floor.of(row).seconds / row.rate)

    return cell.place | {
        "tokens / row and step": cell.median(per("decode_new_tokens", "decode_row_steps")),
        "rows / step": cell.median(per("decode_row_steps", "decode_steps")),
        "ms / step": cell.median(step_ms),
        **{name: f"{_phase_ms(cell, name):.2f}" for name in names},
        "floor, ms": cell.median(lambda row: 1e3 * Floor.of(row).seconds),
        "× floor": cell.median(over_floor),
        "floor bound by": " or ".join(dict.fromkeys(Floor.of(row).bound for row in cell.rows)),
        "by FLOPs from, tokens / row": str(Floor.of(cell.rows[0]).arithmetic_from),
    }


def _phase_ms(cell: Cell, name: str) -> float:
    return cell.spread(lambda row: 1e3 * row.metrics.decode_seconds[name] / row.metrics.decode_steps).median


def step_ms(row: Row) -> float:
    """Milliseconds of a mean decode step."""
    return float(1e3 * sum(row.metrics.decode_seconds.values()) / row.metrics.decode_steps)


def step_time(section: Section, rows: list[Row]) -> None:
    """Median times of steps by tokens per row. Steps have exactly these tokens where all drafts are wrong."""
    for grid in steps_of(rows):
        lengths = [int(length) for row in grid.rows for length in row.samples.num_prompt_tokens]
        longest = max(float(row.metrics.mean_acceptance_length) for row in grid.rows)
        section.say(f"### {escape(grid.title)}")
        section.say(
            f"Prompts of {min(lengths)} to {max(lengths)} tokens; the largest mean acceptance length of a run is "
            f"{longest:.2f} (1.00: every draft is wrong)."
        )
        section.table(step_table(grid))
        lines = []
        for index, cell in enumerate(grid.cells):
            by_tokens = _by_tokens(cell)
            times = {count: Spread.of(map(_median_ms, mine)) for count, mine in by_tokens.items()}
            floors = {count: 1e3 * Floor.of(mine[0], count).seconds for count, mine in by_tokens.items()}
            lines.append(Curve(f"batch {cell.batch_size}", times, colour(None, index)))
            lines.append(Curve("", floors, colour(None, index), "floor"))
        svg = curves(grid.title, "tokens per sample in a step", "ms per step", lines, mark=grid.mark, log=False)
        section.draw(f"Milliseconds of a step by tokens per sample, and dotted its floor: {grid.title}", svg)


def steps_of(rows: Iterable[Row]) -> list[Grid]:
    """A grid for each setting and line, whatever is drafted at a time.

    Runs with one prompt for each row count as one setting, whatever their prompts are.
    """

    def undrafted(row: Row) -> Setting:
        name, _, options = row.drafter_options.removesuffix(")").partition("(")
        kept = [each for each in options.split(", ") if each and not each.startswith("num_speculative_tokens=")]
        drafter = f"{name}({', '.join(kept)})" if kept else name
        return Setting.of(row)._replace(drafter=f"{drafter}, {Line.of(row).label}")

    def without_prompts(row: Row) -> Setting:
        return undrafted(row)._replace(data=row.data_label or row.data, length="")

    timed = [row for row in rows if row.metrics.decode_row_steps]
    follow = {
        setting
        for setting, mine in grouped(timed, without_prompts).items()
        if all(len(row.samples.num_prompt_tokens) == row.batch_size for row in mine)
    }
    return grids(timed, lambda row: each if (each := without_prompts(row)) in follow else undrafted(row))


def step_table(grid: Grid) -> Table:
    """Milliseconds by batch size and tokens per sample, how much longer several tokens take than one, and the floor."""
    lines = []
    for cell in grid.cells:
        by_tokens = _by_tokens(cell)
        for count, rows in by_tokens.items():
            ratio = Spread.within_repeats(rows, by_tokens.get(1, ()), _median_ms) if count > 1 else None
            quoted = cell.batch_size == paper.STEP_ROWS and 1 < count in paper.STEP_MS
            printed = f"{paper.STEP_MS[count] / paper.STEP_MS[1]:.2f}" if quoted else ""
            floor = Floor.of(rows[0], count)
            figures = [Spread.of(map(_median_ms, rows)).text(), ratio.text() if ratio else "", printed]
            lines.append([str(cell.batch_size), str(count), *figures, f"{1e3 * floor.seconds:.2f} ({floor.bound})"])
    return Table(["batch", "tokens", "ms / step", "÷ 1 token", "paper", "floor, ms"], lines, left=2)


def _by_tokens(cell: Cell) -> dict[int, list[Row]]:
    """Rows by the tokens that a row of the batch has in a step: those drafted and the newest.

    The mean is less: what a row drafts is cut where it has less than that left to generate.
    """

    def tokens(row: Row) -> int:
        lengths = (int(length) for length, count in row.metrics.draft_length_histogram.items() if count)
        return 1 + max(lengths, default=0)

    return dict(sorted(grouped(cell.rows, tokens).items()))


def _median_ms(row: Row) -> float:
    return 1e3 * float(row.metrics.median_decode_step_seconds)
