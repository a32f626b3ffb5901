"""Methods by batch size, beside the paper's: Figure 1, Tables 2 to 4, datasets, a user's own, and what pays where."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from math import inf, log2

import pandas as pd

from emssd_lab.report.cells import Grid, Spread, grids, line_name, over, speedup_text, speedups, spread_text, table_of
from emssd_lab.report.figures import Curve, colour, speed_chart
from emssd_lab.report.paper import paper
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import Table, listed

__all__ = ["compare", "crossings", "crossover", "never_slower", "speed_table"]

_Theirs = Mapping[str, Mapping[int, float]]  # speed-ups of the paper by method and batch size


def compare(section: Section, rows: pd.DataFrame) -> None:
    """A table and a plot for each setting, beside the paper's figures where it has some."""
    for grid in grids(rows):
        title, printed = paper().beside(section.name, grid.setting.model, grid.setting.data.partition(",")[0])
        theirs = {method: printed[method] for method in printed if method in {*grid.rows.method}}
        section.head(grid)
        section.table(speed_table(grid, theirs, title, padding=section.name == "ablation"))
        if section.name == "ablation":
            _balance(section, grid, printed)
        dashed = [Curve(f"paper: {line_name(name)}", theirs[name], colour(name), "paper") for name in theirs]
        _draw(section, grid, dashed, f"; dashed, the paper's {title}" if theirs else "")


def _draw(section: Section, grid: Grid, more: Iterable[Curve] = (), caption: str = "") -> None:
    """A curve by batch size for each line that has speed-ups."""
    lines = [
        Curve(name, speedups(rows), colour(rows.method.iloc[0], index))
        for index, (name, rows) in enumerate(grid.lines().items())
    ]
    svg = speed_chart(grid.title, [*lines, *more], grid.mark)
    section.draw(f"Speed-up by batch size: {grid.title}{caption}", svg)


def speed_table(grid: Grid, theirs: _Theirs | None = None, title: str = "", *, padding: bool = False) -> Table:
    """Tokens/s, speed-up and padding of all cells, and the paper's speed-up where it has one.

    With `padding`, the padding of the inputs stands beside that of the KV cache.
    """
    rows = grid.rows
    over_vanilla = over(rows, grid.of("vanilla")).where((rows.base == "greedy") & (rows.method != "vanilla"))
    cells = grid.cells(
        over_vanilla=over_vanilla,
        inputs=rows.input_padding_tokens / rows.num_new_tokens,
        slots=rows.kv_padding_slots / rows.num_new_tokens,
    )
    printed = [(theirs or {}).get(method or "", {}).get(size) for (size, _), method in cells.method.first().items()]
    columns = {
        "tokens/s": cells.rate.agg(spread_text, form=",.0f"),
        "speed-up": [speedup_text(cell) for _, cell in cells],
        "÷ vanilla": cells.over_vanilla.agg(spread_text),
        f"paper's speed-up, {title}": [speedup and f"{speedup:.2f}" for speedup in printed],
        "τ": cells.mean_acceptance_length.median().map("{:.2f}".format),
        "padding/new": cells.padding_per_new_token.median().map("{:.0%}".format),
    }
    if padding:
        columns["padded inputs / new token"] = cells.inputs.median().map("{:.2f}".format)
        columns["KV slots lost / new token"] = cells.slots.median().map("{:.2f}".format)
    return table_of(cells, columns | {"repeats": cells.size().map(str)})


_RATIOS = {
    "inputs ÷ KV": ("unpad_inputs", "unpad_kv"),
    "KV on top of inputs": ("unpad_both", "unpad_inputs"),
    "inputs on top of KV": ("unpad_both", "unpad_kv"),
}


def _balance(section: Section, grid: Grid, theirs: _Theirs) -> None:
    """Compare the gains of the two unpaddings, and the costs of a padded input and a lost slot."""
    ratios = {name: over(grid.of(above), grid.of(below)) for name, (above, below) in _RATIOS.items()}
    sizes = grid.rows.batch_size
    texts = pd.DataFrame({name: ratio.groupby(sizes).agg(spread_text) for name, ratio in ratios.items()})
    texts = texts.dropna(how="all").fillna("")
    if texts.empty:
        return
    section.say("Tokens/s of one method ÷ another's; where *inputs ÷ KV* is above 1, unpadding the inputs gains more.")
    inputs, slots = theirs["unpad_inputs"], theirs["unpad_kv"]
    texts["inputs ÷ KV in the paper"] = [f"{inputs[n] / slots[n]:.2f}" if n in inputs else "" for n in texts.index]
    texts.insert(0, "batch", texts.index.map(str))
    section.table(Table.of(texts))
    row = grid.rows.iloc[0]
    token, slot = 2 * row.matmul_parameters / row.flops_per_second, row.kv_bytes_per_token / row.bytes_per_second
    section.say(
        f"By this machine's rates a padded input costs {1e6 * token:,.3g} µs of arithmetic, once; a lost KV slot costs "
        f"{1e6 * slot:,.3g} µs of reading in every later step, which is as much after {token / slot:,.0f} steps."
    )


def crossover(section: Section, rows: pd.DataFrame) -> None:
    """Up to which batch size speculation pays."""
    for grid in grids(rows):
        section.head(grid)
        section.table(crossings(grid))
        section.table(speed_table(grid))
        _draw(section, grid)


def never_slower(section: Section, rows: pd.DataFrame) -> None:
    """`budget=adaptive` ÷ plain greedy decoding, and ÷ the best of it and fixed lengths; the worst cell first."""
    lines = list[tuple[float, list[str]]]()
    for grid in grids(rows):
        for size, cells in grid.rows.groupby("batch_size"):
            by_name = {str(name): line for name, line in cells.groupby("line")}
            adaptive = [by_name.pop(name) for name in list(by_name) if name.startswith("adaptive")]
            for line in adaptive if by_name else ():
                best = max(by_name.values(), key=lambda other: float(other.rate.median()))
                ratios = pd.DataFrame({"plain": line.speedup, "best": over(line, best)})
                middle, error = ratios.median(), 2 * ratios.sem().fillna(inf)
                texts = [f"{ratio:.3f} ± {spread:.3f}" for ratio, spread in zip(middle, error, strict=True)]
                lines.append((middle.best, [grid.title, str(size), *texts]))
    columns = ["setting", "batch", "÷ plain", "÷ the best of plain and fixed lengths"]
    section.table(Table(columns, [line for _, line in sorted(lines)], left=1))
    crossover(section, rows)


def crossings(grid: Grid) -> Table:
    """The batch sizes at which each line pays, and where its median speed-up first falls below 1."""
    lines = []
    for name, rows in grid.lines().items():
        if by_size := speedups(rows):
            pays = [size for size, spread in by_size.items() if spread.median >= 1]
            unclear = [size for size, spread in by_size.items() if spread.count > 1 and spread.low <= 1 <= spread.high]
            at = crossing_at(by_size)
            near = "" if at is None else f"{at:.2g}" if at < 10 else f"{at:.0f}"
            lines.append([name, listed(pays), listed(unclear), near])
    return Table(["method", "pays at batch size", "repeats on both sides of 1 at", "falls below 1 near"], lines)


def crossing_at(by_size: Mapping[int, Spread]) -> float | None:
    """The batch size at which the medians first fall below 1, interpolated on a logarithmic scale."""
    for left, right in itertools.pairwise(sorted(by_size)):
        high, low = by_size[left].median, by_size[right].median
        if high >= 1 > low:
            return float(2 ** (log2(left) + (high - 1) / (high - low) * (log2(right) - log2(left))))
    return None
