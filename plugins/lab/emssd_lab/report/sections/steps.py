"""The time of a step: where it goes, its floor, and how it grows with the tokens of each row."""

from __future__ import annotations

from math import ceil

import pandas as pd

from emssd_lab.costs import Costs
from emssd_lab.report.cells import Grid, Setting, Spread, grids, over, spread_text, table_of
from emssd_lab.report.figures import Curve, colour, curves
from emssd_lab.report.paper import paper
from emssd_lab.report.rows import Row
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import Table, escape

__all__ = ["floors", "step_table", "step_time", "steps_of", "time_of_steps"]


def floors(rows: pd.DataFrame, tokens_per_row: float | None = None) -> pd.DataFrame:
    """The floor of a mean decode step of each row, as it was or with another number of tokens per row.

    The columns ``bytes`` and ``FLOPs`` are seconds: weights and the rows' KV moved once, at the measured bandwidth; and
    the arithmetic of all computed tokens, at the measured rate of a large product. A draft model's work is in neither.
    The two overlap, so ``seconds`` is the larger one, named in ``bound``. With ``from`` tokens per row or more,
    arithmetic takes longer.
    """
    num_rows = rows.decode_row_steps / rows.decode_steps
    tokens = rows.decode_computed_tokens / rows.decode_row_steps if tokens_per_row is None else tokens_per_row
    costs = Costs(rows.weight_bytes, rows.kv_bytes_per_token, rows.matmul_parameters, rows.attention_flops_per_kv_token)
    moved, flops = costs.of_step(num_rows, num_rows * tokens, rows.decode_kv_tokens / rows.decode_steps)
    made = pd.DataFrame({"bytes": moved / rows.bytes_per_second, "FLOPs": flops / rows.flops_per_second})
    return made.assign(
        seconds=made.max(axis=1),
        bound=["FLOPs" if by_flops else "bytes" for by_flops in made.FLOPs >= made.bytes],
        **{"from": (made.bytes * tokens / made.FLOPs).map(lambda number: max(1, ceil(number)))},
    )


def time_of_steps(section: Section, rows: pd.DataFrame) -> None:
    """The milliseconds of a decode step by phase, beside its floor."""
    for experiment, mine in rows.groupby("experiment", sort=False):
        for grid in grids(mine):
            section.head(grid, f"{experiment}: ")
            section.table(_phases(grid))


def _phases(grid: Grid) -> Table:
    rows, floor, names = grid.rows, floors(grid.rows), list(grid.rows.decode_seconds.iloc[0])
    phases = 1e3 * pd.DataFrame(list(rows.decode_seconds), rows.index)[names].div(rows.decode_steps, axis=0)
    figures = {
        "tokens / row and step": rows.decode_new_tokens / rows.decode_row_steps,
        "rows / step": rows.decode_row_steps / rows.decode_steps,
        "ms / step": phases.sum(axis=1),
        **phases,
        "floor, ms": 1e3 * floor.seconds,
        "× floor": rows.decode_new_tokens / rows.decode_steps / floor.seconds / rows.rate,
    }
    cells = grid.cells(**figures, bound=floor.bound, first=floor["from"])
    medians = cells[[*figures]].median()
    bounds = cells.bound.agg(lambda column: " or ".join(dict.fromkeys(column)))
    last = {"floor bound by": bounds, "by FLOPs from, tokens / row": cells["first"].first().map(str)}
    return table_of(cells, {**medians.map("{:.2f}".format), **last})


def step_time(section: Section, rows: pd.DataFrame) -> None:
    """Median times of steps by tokens per row. Steps have exactly these tokens where all drafts are wrong."""
    for grid in steps_of(rows):
        lengths = [int(length) for row in grid.rows.row for length in row.samples.num_prompt_tokens]
        section.say(f"### {escape(grid.title)}")
        section.say(
            f"Prompts of {min(lengths)} to {max(lengths)} tokens; the largest mean acceptance length of a run is "
            f"{grid.rows.mean_acceptance_length.max():.2f} (1.00: every draft is wrong)."
        )
        section.table(step_table(grid))
        lines = []
        for index, (size, cell) in enumerate(grid.rows.groupby("batch_size")):
            by_tokens = dict(list(cell.groupby("tokens")))
            times = {tokens: spread for tokens, mine in by_tokens.items() if (spread := Spread.of(mine.median_ms))}
            floor = {tokens: 1e3 * floors(mine, tokens).seconds.iloc[0] for tokens, mine in by_tokens.items()}
            lines.append(Curve(f"batch {size}", times, colour(None, index)))
            lines.append(Curve("", floor, colour(None, index), "floor"))
        svg = curves(grid.title, "tokens per sample in a step", "ms per step", lines, mark=grid.mark, log=False)
        section.draw(f"Milliseconds of a step by tokens per sample, and dotted its floor: {grid.title}", svg)


def steps_of(rows: pd.DataFrame) -> list[Grid]:
    """A grid for each setting and line, whatever is drafted at a time, with the columns ``median_ms`` and ``tokens``.

    The tokens are those that a row of the batch has in a step: the longest draft and the newest token. The mean is
    less, as drafts are cut at the end of a row. Runs with one prompt for each row count as one setting, whatever their
    prompts are.
    """
    timed = rows[rows.decode_row_steps > 0]
    longest = [max((k for k, count in counts.items() if count), default=0) for counts in timed.draft_length_histogram]
    lines = zip(timed.row, timed.line, strict=True)
    timed = timed.assign(
        median_ms=1e3 * timed.median_decode_step_seconds,
        tokens=[1 + length for length in longest],
        setting=[_undrafted(row, line) for row, line in lines],
        fits=[len(row.samples.num_prompt_tokens) == row.batch_size for row in timed.row],
    )
    loose = [
        setting._replace(data=row.data_label or row.data, length="")
        for setting, row in zip(timed.setting, timed.row, strict=True)
    ]
    timed = timed.assign(loose=loose)
    follow = timed.groupby("loose", sort=False).fits.transform("all")
    return grids(timed.assign(setting=timed.loose.where(follow, timed.setting)))


def _undrafted(row: Row, line: str) -> Setting:
    """The setting of `row` without how much is drafted, but with its line."""
    name, _, options = row.drafter_options.removesuffix(")").partition("(")
    kept = [option for option in options.split(", ") if option and not option.startswith("num_speculative_tokens=")]
    drafter = f"{name}({', '.join(kept)})" if kept else name
    return Setting.of(row)._replace(drafter=f"{drafter}, {line}")


def step_table(grid: Grid) -> Table:
    """Milliseconds by batch size and tokens per sample, how much longer several tokens take than one, and the floor."""
    rows = grid.rows
    over_one = over(rows, rows[rows.tokens == 1], "median_ms").where(rows.tokens > 1)
    theirs, lines = paper().step_ms, []
    for (size, tokens), cell in rows.assign(over_one=over_one).groupby(["batch_size", "tokens"]):
        quoted = size == paper().step_rows and 1 < tokens in theirs
        floor = floors(cell, tokens).iloc[0]
        lines.append({
            "batch": str(size),
            "tokens": str(tokens),
            "ms / step": spread_text(cell.median_ms),
            "÷ 1 token": spread_text(cell.over_one) or "",
            "paper": f"{theirs[tokens] / theirs[1]:.2f}" if quoted else "",
            "floor, ms": f"{1e3 * floor.seconds:.2f} ({floor.bound})",
        })  # fmt: skip
    return Table.of(lines, left=2)
