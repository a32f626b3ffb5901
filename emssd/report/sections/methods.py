"""Methods by batch size: Figure 1, Tables 2 to 4, the appendix's datasets, a user's own, and where speculation pays."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from math import log2

from emssd.report import paper
from emssd.report.cells import Cell, Grid, Line, Spread, grids
from emssd.report.figures import Curve, colour, speed_chart
from emssd.report.rows import Row, per
from emssd.report.sections.common import CELL, About, Section, speedup_curves
from emssd.report.tables import Table, escape, grouped, listed, table_of

__all__ = ["COMPARISONS", "CROSSOVER", "advice", "crossing_at", "crossings", "own", "speed_table"]

_Theirs = Mapping[str, Mapping[int, float]]  # speed-ups of the paper by method and batch size

_DATA = {"gsm8k": "GSM8K", "spec_math": "GSM8K", "mt_bench": "MT-Bench", "spec_mt_bench": "MT-Bench"}
"""Tasks with prompts of the paper's datasets; others stand beside those of CNN/Daily Mail."""


def _compare(section: Section, rows: list[Row], *, drafter: str = "", models: Seq[str] = ("",)) -> None:
    """A table and a plot for each setting, beside the paper's figures.

    Args:
        drafter, models: of the paper's figures; the first model where that of the rows is not among them.
    """
    found = grids(rows)
    if section.name == "datasets":
        _datasets(section, found)
    for grid in found:
        model = grid.setting.model if grid.setting.model in models else models[0]
        data = _data(grid) if section.name == "datasets" else paper.CNN_DAILYMAIL
        printed, called = paper.SPEEDUPS.get((drafter, model, data), {}), f"{paper.label(model)}, {data}"
        theirs = {m: printed[m] for m in printed if any(cell.line.method == m for cell in grid.cells)}
        section.head(grid)
        section.table(speed_table(grid, theirs, called, _PADDED if section.name == "ablation" else {}))
        if section.name == "ablation":
            _balance(section, grid, printed)
        title = f"Speed-up by batch size: {grid.title}" + (f"; dashed, the paper's {called}" if theirs else "")
        section.draw(title, speed_chart(grid.title, [*speedup_curves(grid), *_dashed(theirs)], grid.mark))


_llma, _draft_model = (partial(_compare, drafter=name) for name in ("llma", "draft_model"))

COMPARISONS = (
    About(
        "fig1",
        "Figure 1: speed-up by batch size",
        "In the paper its method is faster than the vanilla one at every batch size, and the more so the larger the "
        "batch.",
        partial(_llma, models=["opt-6.7b"]),
    ),
    About(
        "ablation",
        "Table 2: unpadding the KV cache, the inputs, or both",
        "The paper's text says that unpadding the KV cache gains more; its Table 2, that unpadding the inputs does.",
        partial(_llma, models=["opt-6.7b"]),
    ),
    About(
        "llma_models",
        "Table 3: LLMA on models of several sizes",
        "In the paper the vanilla method's speed-up falls quickly with the batch size, that of its own more gradually.",
        partial(_llma, models=["opt-2.7b", "opt-13b"]),
    ),
    About(
        "draft_models",
        "Table 4: drafts by a draft model",
        "In the paper OPT-125m drafts 4 tokens for every row, and its method is faster than the vanilla one "
        "throughout.",
        partial(_draft_model, models=["opt-2.7b", "opt-6.7b", "opt-13b"]),
    ),
    About(
        "datasets",
        "Appendix: several datasets",
        "The paper's appendix says that its method gains the more, the more is padded.",
        partial(_draft_model, models=["opt-13b"]),
    ),
)


def own(rows: list[Row], number: int) -> Section | None:
    """The section of an experiment that the paper does not have, and that has no section of its own."""
    title = f"Experiment {escape(rows[0].experiment)}"
    claim = "An experiment of your own; the paper has nothing to compare it with."
    return About(rows[0].experiment, title, claim, _compare).section(rows, f"own{number}")


_PADDED: dict[str, Callable[[Cell], str]] = {
    "padded inputs / new token": lambda cell: cell.median(per("input_padding_tokens", "num_new_tokens")),
    "KV slots lost / new token": lambda cell: cell.median(per("kv_padding_slots", "num_new_tokens")),
}


def speed_table(
    grid: Grid, theirs: _Theirs | None = None, called: str = "", more: Mapping[str, Callable[[Cell], str]] | None = None
) -> Table:
    """Tokens/s, speed-up and padding of all cells, and the paper's speed-up where it has one."""

    def over_vanilla(cell: Cell) -> str:
        alike = cell.line.baseline == "greedy" and cell.line.method != "vanilla"
        ratio = grid.ratio(cell.line.method or "", "vanilla", cell.batch_size) if alike else None
        return "" if ratio is None else ratio.text()

    def printed(cell: Cell) -> str:
        ratio = (theirs or {}).get(cell.line.method or "", {}).get(cell.batch_size)
        return "" if ratio is None else f"{ratio:.2f}"

    columns: dict[str, Callable[[Cell], str]] = {
        "tokens/s": lambda cell: cell.spread("decode_tokens_per_second").text(",.0f"),
        "speed-up": Cell.speedup_text,
        "÷ vanilla": over_vanilla,
        f"paper's speed-up, {called}": printed,
        "τ": lambda cell: cell.median("mean_acceptance_length"),
        "padding/new": lambda cell: cell.median("padding_per_new_token", ".0%"),
        **(more or {}),
        "repeats": lambda cell: str(len(cell.rows)),
    }
    return table_of(grid.cells, CELL | columns, left=2)


_RATIOS = {
    "inputs ÷ KV": ("unpad_inputs", "unpad_kv"),
    "KV on top of inputs": ("unpad_both", "unpad_inputs"),
    "inputs on top of KV": ("unpad_both", "unpad_kv"),
}


def _balance(section: Section, grid: Grid, theirs: _Theirs) -> None:
    """Compare the gains of the two unpaddings, and the costs of a padded input and a lost slot."""
    printed = {size: f"{ratio / theirs['unpad_kv'][size]:.2f}" for size, ratio in theirs["unpad_inputs"].items()}
    lines = []
    for size in sorted({cell.batch_size for cell in grid.cells}):
        here = [grid.ratio(above, below, size) for above, below in _RATIOS.values()]
        if any(here):
            lines.append([str(size), *(each.text() if each else "" for each in here), printed.get(size, "")])
    if not lines:
        return
    section.say("Tokens/s of one method ÷ another's; where *inputs ÷ KV* is above 1, unpadding the inputs gains more.")
    section.table(Table(["batch", *_RATIOS, "inputs ÷ KV in the paper"], lines))
    row = grid.rows[0]
    token = 2 * row.costs["matmul_parameters"] / row.provenance["hardware"]["flops_per_second"]
    slot = row.costs["kv_bytes_per_token"] / row.provenance["hardware"]["bytes_per_second"]
    section.say(
        f"By this machine's rates a padded input costs {1e6 * token:,.3g} µs of arithmetic, once; a lost KV slot costs "
        f"{1e6 * slot:,.3g} µs of reading in every later step, which is as much after {token / slot:,.0f} steps."
    )


def _dashed(theirs: _Theirs) -> list[Curve]:
    return [
        Curve(f"paper: {Line(method).label}", by_size, colour(method), "paper") for method, by_size in theirs.items()
    ]


def _data(grid: Grid) -> str:
    return _DATA.get(grid.setting.data.partition(",")[0], paper.CNN_DAILYMAIL)


def _datasets(section: Section, found: Seq[Grid]) -> None:
    common = set.intersection(*({cell.batch_size for cell in grid.cells} for grid in found))
    if not common:
        return
    size = 8 if 8 in common else max(common)
    lines = []
    for grid in found:
        vanilla, ours, *others = (grid.get(name, size) for name in ("vanilla", "unpad_both", "ragged", "flashinfer"))
        samples = next(cell for cell in grid.cells if cell.batch_size == size).rows[0].samples
        padding = vanilla.median("padding_per_new_token", ".1%") if vanilla else ""
        speedups = [cell.speedup_text() if cell else "" for cell in (vanilla, ours, others[0] or others[1])]
        lengths = [f"{statistics.mean(samples['num_prompt_tokens']):.0f}", f"{max(samples['num_new_tokens']):.0f}"]
        lines.append([grid.title, *lengths, padding, *speedups])
    for each in paper.DATASETS:
        figures = [f"{each.input_length:.0f}", str(each.output_length), f"{each.padding:.1%}"]
        lines.append([f"paper: {each.name}", *figures, f"{each.vanilla:.2f}", f"{each.ours:.2f}", ""])
    section.say(f"Speed-ups at batch size {size}; the paper's are of batch size 8.")
    columns = ["data", "input length", "longest output", "padding / new token", "vanilla", "EMS-SD", "emssd's backend"]
    section.table(Table(columns, lines))


def _crossover(section: Section, rows: list[Row]) -> None:
    for grid in grids(rows):
        section.head(grid)
        for table in (crossings(grid), advice(grid), speed_table(grid)):
            section.table(table)
        chart = speed_chart(grid.title, speedup_curves(grid), grid.mark)
        section.draw(f"Speed-up by batch size: {grid.title}", chart)


CROSSOVER = About(
    "crossover",
    "Crossover: where speculation stops paying",
    "Up to which batch size speculation pays, for one model, machine and kind of prompts.",
    _crossover,
)


def crossings(grid: Grid) -> Table:
    """The batch sizes at which each line pays, and where its median speed-up first falls below 1."""
    lines = []
    for line, cells in grid.by_line().items():
        if speedups := {cell.batch_size: spread for cell in cells if (spread := cell.speedup)}:
            pays = [size for size, spread in speedups.items() if spread.median >= 1]
            unclear = [size for size, spread in speedups.items() if spread.count > 1 and spread.covers(1)]
            at = crossing_at(speedups)
            near = "" if at is None else f"{at:.2g}" if at < 10 else f"{at:.0f}"
            lines.append([line.label, listed(pays), listed(unclear), near])
    return Table(["method", "pays at batch size", "repeats on both sides of 1 at", "falls below 1 near"], lines)


def crossing_at(speedups: Mapping[int, Spread]) -> float | None:
    """The batch size at which the medians first fall below 1, interpolated on a logarithmic scale."""
    for left, right in itertools.pairwise(sorted(speedups)):
        high, low = speedups[left].median, speedups[right].median
        if high >= 1 > low:
            return float(2 ** (log2(left) + (high - 1) / (high - low) * (log2(right) - log2(left))))
    return None


def advice(grid: Grid) -> Table:
    """The fastest at each batch size, and how sure that is."""
    lines = []
    for size, cells in grouped(grid.cells, lambda cell: cell.batch_size).items():
        compared = [(spread.median, spread, cell) for cell in cells if (spread := cell.speedup)]
        if not compared:
            tried = any(cell.line.speculate for cell in cells)
            why = "no row of plain greedy decoding" if tried else "nothing but plain greedy decoding was run"
            lines.append([str(size), "", f"not known: {why}"])
            continue
        _, gain, cell = max(compared, key=lambda each: each[0])
        use = f"{grid.setting.drafter}, {cell.line.label}" if gain.median > 1 else "plain greedy decoding"
        note = " (one repeat)" if gain.count == 1 else " (too close to call)" if gain.covers(1) else ""
        lines.append([str(size), gain.text(), use + note])
    return Table(["batch", "largest speed-up", "use"], lines, left=3)
