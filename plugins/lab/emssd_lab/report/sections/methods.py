"""Methods by batch size, beside the paper's: Figure 1, Tables 2 to 4, datasets, a user's own, and what pays where."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from math import log2

from emssd_lab.report import paper
from emssd_lab.report.cells import Grid, Line, Spread, grids
from emssd_lab.report.figures import Curve, colour, speed_chart
from emssd_lab.report.rows import Row, per
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import Table, grouped, listed

__all__ = ["compare", "crossings", "crossover", "never_slower", "speed_table"]

_Theirs = Mapping[str, Mapping[int, float]]  # speed-ups of the paper by method and batch size

_PRINTED = {
    "fig1": ("llma", ["opt-6.7b"]),
    "ablation": ("llma", ["opt-6.7b"]),
    "llma_models": ("llma", ["opt-2.7b", "opt-13b"]),
    "draft_models": ("draft_model", ["opt-2.7b", "opt-6.7b", "opt-13b"]),
    "datasets": ("draft_model", ["opt-13b"]),
}
"""The paper's drafter and models, by experiment; the first model stands beside rows of other models."""

_DATA = {"gsm8k": "GSM8K", "spec_math": "GSM8K", "mt_bench": "MT-Bench", "spec_mt_bench": "MT-Bench"}
"""Tasks with prompts of the paper's datasets; others stand beside those of CNN/Daily Mail."""


def compare(section: Section, rows: list[Row]) -> None:
    """A table and a plot for each setting, beside the paper's figures where it has some."""
    found = grids(rows)
    if section.name == "datasets":
        _datasets(section, found)
    drafter, models = _PRINTED.get(section.name, ("", [""]))
    for grid in found:
        model = grid.setting.model if grid.setting.model in models else models[0]
        task = grid.setting.data.partition(",")[0] if section.name == "datasets" else ""
        data = _DATA.get(task, paper.CNN_DAILYMAIL)
        printed, called = paper.SPEEDUPS.get((drafter, model, data), {}), f"{paper.label(model)}, {data}"
        theirs = {
            method: printed[method] for method in printed if any(cell.line.method == method for cell in grid.cells)
        }
        section.head(grid)
        section.table(speed_table(grid, theirs, called, padding=section.name == "ablation"))
        if section.name == "ablation":
            _balance(section, grid, printed)
        dashed = [Curve(f"paper: {Line(name).label}", theirs[name], colour(name), "paper") for name in theirs]
        title = f"Speed-up by batch size: {grid.title}" + (f"; dashed, the paper's {called}" if theirs else "")
        section.draw(title, _chart(grid, dashed))


def _chart(grid: Grid, more: Seq[Curve] = ()) -> str:
    """A curve by batch size for each line that has speed-ups."""
    lines = [
        Curve(line.label, {cell.batch_size: cell.speedup for cell in cells if cell.speedup}, colour(line.method, index))
        for index, (line, cells) in enumerate(grid.by_line().items())
    ]
    return speed_chart(grid.title, [*lines, *more], grid.mark)


def speed_table(grid: Grid, theirs: _Theirs | None = None, called: str = "", *, padding: bool = False) -> Table:
    """Tokens/s, speed-up and padding of all cells, and the paper's speed-up where it has one.

    With `padding`, the padding of the inputs stands beside that of the KV cache.
    """
    lines = []
    for cell in grid.cells:
        method, size = cell.line.method, cell.batch_size
        alike = cell.line.baseline == "greedy" and method != "vanilla"
        printed = (theirs or {}).get(method or "", {}).get(size)
        line = cell.place | {
            "tokens/s": cell.spread("decode_tokens_per_second").text(",.0f"),
            "speed-up": cell.speedup_text,
            "÷ vanilla": grid.ratio(method, "vanilla", size) if alike else None,
            f"paper's speed-up, {called}": f"{printed:.2f}" if printed else None,
            "τ": cell.median("mean_acceptance_length"),
            "padding/new": cell.median("padding_per_new_token", ".0%"),
        }
        if padding:
            line["padded inputs / new token"] = cell.median(per("input_padding_tokens", "num_new_tokens"))
            line["KV slots lost / new token"] = cell.median(per("kv_padding_slots", "num_new_tokens"))
        lines.append(line | {"repeats": str(len(cell.rows))})
    return Table.of(lines, left=2)


_RATIOS = {
    "inputs ÷ KV": ("unpad_inputs", "unpad_kv"),
    "KV on top of inputs": ("unpad_both", "unpad_inputs"),
    "inputs on top of KV": ("unpad_both", "unpad_kv"),
}


def _balance(section: Section, grid: Grid, theirs: _Theirs) -> None:
    """Compare the gains of the two unpaddings, and the costs of a padded input and a lost slot."""
    lines = []
    for size in sorted({cell.batch_size for cell in grid.cells}):
        here = {name: grid.ratio(above, below, size) or "" for name, (above, below) in _RATIOS.items()}
        printed = theirs["unpad_inputs"].get(size, 0.0) / theirs["unpad_kv"].get(size, 1.0)
        if any(here.values()):
            lines.append({"batch": str(size), **here, "inputs ÷ KV in the paper": f"{printed:.2f}" if printed else ""})
    if not lines:
        return
    section.say("Tokens/s of one method ÷ another's; where *inputs ÷ KV* is above 1, unpadding the inputs gains more.")
    section.table(Table.of(lines))
    row = grid.rows[0]
    token = 2 * row.costs.matmul_parameters / row.provenance.hardware.flops_per_second
    slot = row.costs.kv_bytes_per_token / row.provenance.hardware.bytes_per_second
    section.say(
        f"By this machine's rates a padded input costs {1e6 * token:,.3g} µs of arithmetic, once; a lost KV slot costs "
        f"{1e6 * slot:,.3g} µs of reading in every later step, which is as much after {token / slot:,.0f} steps."
    )


def _datasets(section: Section, found: Seq[Grid]) -> None:
    """Lengths, padding and speed-ups of all datasets at one batch size."""
    common = set.intersection(*({cell.batch_size for cell in grid.cells} for grid in found))
    if not common:
        return
    size = 8 if 8 in common else max(common)
    lines = []
    for grid in found:
        vanilla, ours, *others = (grid.get(name, size) for name in ("vanilla", "unpad_both", "ragged", "flashinfer"))
        samples = next(cell for cell in grid.cells if cell.batch_size == size).rows[0].samples
        padding = vanilla.median("padding_per_new_token", ".1%") if vanilla else ""
        speedups = [(cell and cell.speedup_text) or "" for cell in (vanilla, ours, others[0] or others[1])]
        lengths = [f"{statistics.mean(samples.num_prompt_tokens):.0f}", f"{max(samples.num_new_tokens):.0f}"]
        lines.append([grid.title, *lengths, padding, *speedups])
    for each in paper.DATASETS:
        figures = [f"{each.input_length:.0f}", str(each.output_length), f"{each.padding:.1%}"]
        lines.append([f"paper: {each.name}", *figures, f"{each.vanilla:.2f}", f"{each.ours:.2f}", ""])
    columns = ["data", "input length", "longest output", "padding / new token", "vanilla", "EMS-SD", "emssd's backend"]
    section.table(Table(columns, lines), f"Speed-ups at batch size {size}; the paper's are of batch size 8.")


def crossover(section: Section, rows: list[Row]) -> None:
    """Up to which batch size speculation pays, and the fastest at each."""
    for grid in grids(rows):
        section.head(grid)
        for table in (crossings(grid), advice(grid), speed_table(grid)):
            section.table(table)
        section.draw(f"Speed-up by batch size: {grid.title}", _chart(grid))


def never_slower(section: Section, rows: list[Row]) -> None:
    """`budget=adaptive` ÷ plain greedy decoding, and ÷ the best fixed length; the worst cell first."""
    lines = list[tuple[float, list[str]]]()
    for grid in grids(rows):
        for size, cells in grouped(grid.cells, lambda cell: cell.batch_size).items():
            gains = [(cell.line.budget, spread.median) for cell in cells if (spread := cell.speedup)]
            fixed = max([1.0, *(gain for budget, gain in gains if not budget.startswith("adaptive"))])
            lines += [
                (gain / fixed, [grid.title, str(size), f"{gain:.2f}", f"{gain / fixed:.2f}"])
                for budget, gain in gains
                if budget.startswith("adaptive")
            ]
    columns = ["setting", "batch", "÷ plain", "÷ the best of plain and fixed lengths"]
    section.table(Table(columns, [line for _, line in sorted(lines)], left=1))
    crossover(section, rows)


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
