"""Where measured speed-ups have another shape than the paper's, and why: sentences that follow from the figures."""

from __future__ import annotations

from collections.abc import Callable

from emssd.report import paper
from emssd.report.cells import Cell, Grid
from emssd.report.floor import Floor, arithmetic_from
from emssd.report.lines import baseline_method
from emssd.report.rows import Row
from emssd.report.sections.common import Section
from emssd.report.text import escape, listed

__all__ = ["say_why"]


def say_why(section: Section, grid: Grid, drafter: str, model: str, data: str = paper.CNN_DAILYMAIL) -> None:
    """Add what explains the difference between `grid` and the paper's figures of `drafter`, `model` and `data`."""
    sentences = [
        _setting(grid, drafter, model, data),
        *_bounds(grid, drafter),
        _needed(grid, drafter, model, data),
        _two_baselines(grid),
    ]
    section.say("*Where the shape differs from the paper's, and why:*")
    section.points(sentence for sentence in sentences if sentence)
    _factors(section, grid)


def _setting(grid: Grid, drafter: str, model: str, data: str) -> str:
    row, each = grid.rows[0], grid.setting
    lengths = row.samples["num_prompt_tokens"]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    parameters = row.costs["matmul_parameters"] / 1e6
    theirs = {entry.name: entry for entry in paper.DATASETS}[data]
    return (
        f"Here {escape(each.model)} ({parameters:,.0f}M weights in matrix products, {each.dtype}) with "
        f"{escape(each.drafter)} on {escape(each.data)}: prompts of {mean:.0f} tokens on average, up to "
        f"{each.max_new_tokens} new ones. The paper: {paper.label(model)}, float16, A100, {theirs.name}: "
        f"{theirs.input_length:.0f} tokens and {theirs.output_length}; drafts of {paper.DRAFTED[drafter]}."
    )


def _bounds(grid: Grid, drafter: str) -> list[str]:
    """What bounds a step of plain greedy decoding at each batch size, and from where on it is arithmetic."""
    found = []
    for cell in _greedy(grid):
        row = cell.rows[len(cell.rows) // 2]
        floor, tokens = Floor.of(row), arithmetic_from(row)
        if floor is not None and tokens is not None:
            share = floor.tokens_per_second / cell.tokens_per_second.median
            found.append((cell.batch_size, floor.bound, tokens, share))
    if not found:
        return []
    by_bound = {bound: [str(size) for size, each, *_ in found if each == bound] for bound in ("bytes", "FLOPs")}
    said = [f"bound by {bound} at batch size {listed(sizes)}" for bound, sizes in by_bound.items() if sizes]
    starts = listed(f"{tokens} (batch {size})" for size, _, tokens, _ in found)
    spent = listed(f"{share:.1f} times (batch {size})" for size, _, _, share in found)
    return [
        f"By its floor, a step of plain greedy decoding is {' and '.join(said)} on this machine; arithmetic takes over "
        f"at so many tokens per row: {starts}. A token verified beyond that costs as much as one that is kept. "
        + _bounds_there(drafter),
        f"A step of plain greedy decoding takes {spent} its floor; what of that does not depend on the number of "
        f"tokens is shared by more of them when drafts are verified.",
    ]


def _bounds_there(drafter: str) -> str:
    """The same of the paper's machine, by its data sheet."""
    low, high = paper.datasheet_tokens()
    tokens = paper.DRAFTED[drafter] + 1
    greedy = "at every batch size that it shows" if low >= paper.GREATEST_BATCH else f"up to {low:.0f} rows"
    return (
        f"The paper's A100 reads float16 weights in the time in which it computes {low:.0f} to {high:.0f} tokens (by "
        f"its data sheet): its greedy decoding is bound by bytes {greedy} (up to {paper.GREATEST_BATCH} rows), its "
        f"steps of {tokens} tokens per row up to {int(low / tokens)} to {int(high / tokens)} rows."
    )


def _factors(section: Section, grid: Grid) -> None:
    """Speed-up = tokens per row and step gained x rows of a step kept ÷ time of a step added."""
    lines = []
    for cell in grid.cells:
        base = _baseline_cell(grid, cell)
        if cell.speedup is None or base is None or cell.line.method in ("vanilla", "unpad_kv", "unpad_inputs"):
            continue
        factors = [_ratio(cell, base, figure) for figure in (_tokens_per_row_step, _rows_per_step, _seconds_per_step)]
        lines.append(
            [
                str(cell.batch_size),
                escape(cell.line.label),
                *(f"{factor:.2f}" for factor in factors),
                f"{factors[0] * factors[1] / factors[2]:.2f}",
            ]
        )
    if lines:
        section.say(
            "What the speed-up is made of, as multiples of plain greedy decoding: tokens per row and step, times the "
            "rows of a mean step (of a static batch the quick rows end early), divided by the time of a step. "
            "Medians of each, so that their product is near the median speed-up."
        )
        columns = ["batch", "method", "tokens per row and step", "rows per step", "time of a step", "together"]
        section.table(columns, lines, left=2)


def _needed(grid: Grid, drafter: str, model: str, data: str) -> str:
    """A row's step that verifies drafts takes no less than one of plain decoding, so a speed-up needs a τ as large."""
    theirs, found = paper.speedups(drafter, model, "unpad_both", data), {True: list[str](), False: list[str]()}
    for size in grid.batch_sizes:
        taus = [
            c.spread("mean_acceptance_length").median for c in grid.cells if c.batch_size == size and c.line.speculate
        ]
        if size in theirs and taus:
            found[max(taus) >= theirs[size]].append(f"batch {size}: {theirs[size]:.2f} there, τ {max(taus):.2f} here")
    if not any(found.values()):
        return ""
    said = [
        f"{what} ({'; '.join(found[enough])})"
        for enough, what in ((True, "within reach"), (False, "out of reach with these drafts"))
        if found[enough]
    ]
    return f"The paper's speed-up needs a τ of at least as much: {', '.join(said)}."


def _two_baselines(grid: Grid) -> str:
    """That speed-ups on different kernels have different baselines, where both were run."""
    found = []
    for size in grid.batch_sizes:
        greedy, speculating = grid.ratio("ragged_greedy", "greedy", size), grid.ratio("ragged", "unpad_both", size)
        if greedy and speculating:
            found.append(f"batch {size}: {greedy.median:.2f} and {speculating.median:.2f}")
    return (
        "`ragged` has another baseline than the four cells, on its own kernels. Its tokens/s ÷ theirs, of plain "
        f"greedy decoding and of EMS-SD: {'; '.join(found)}. A smaller speed-up over a faster baseline can be more "
        "tokens/s."
        if found
        else ""
    )


def _greedy(grid: Grid) -> list[Cell]:
    """The baseline cells of one line: that of the paper's kernels, if it was run."""
    lines = [line for line in grid.lines if not line.speculate]
    return [cell for cell in grid.cells if lines and cell.line == lines[0] and cell.rows[0].metrics["decode_steps"]]


def _baseline_cell(grid: Grid, cell: Cell) -> Cell | None:
    wanted = baseline_method(cell.line.method)
    greedy = [each for each in grid.cells if each.batch_size == cell.batch_size and not each.line.speculate]
    if wanted is not None:
        return next((each for each in greedy if each.line.method == wanted), None)
    return next((each for each in greedy if each.line.backend == cell.line.backend), None)


def _ratio(cell: Cell, base: Cell, figure: Callable[[Row], float]) -> float:
    return cell.spread(figure).median / (base.spread(figure).median or 1.0)


def _tokens_per_row_step(row: Row) -> float:
    return float(row.metrics["decode_new_tokens"] / max(row.metrics["decode_row_steps"], 1))


def _rows_per_step(row: Row) -> float:
    return float(row.metrics["decode_row_steps"] / max(row.metrics["decode_steps"], 1))


def _seconds_per_step(row: Row) -> float:
    return float(sum(row.metrics["decode_seconds"].values()) / max(row.metrics["decode_steps"], 1))
