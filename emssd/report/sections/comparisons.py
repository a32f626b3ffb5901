"""Methods by batch size: Figure 1, Tables 2 to 4, the appendix's datasets, and a user's own comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from emssd.report import paper
from emssd.report.cells import Cell, Grid, Line, grids
from emssd.report.figures import Curve, colour, speed_chart
from emssd.report.rows import per
from emssd.report.sections.common import CELL, Section, begin, speedup_curves
from emssd.report.sources import Material
from emssd.report.tables import Table, escape, table_of

__all__ = ["COMPARISONS", "Comparison", "comparison", "own", "speed_table"]

_Theirs = Mapping[str, Mapping[int, float]]  # speed-ups of the paper by method and batch size


class Comparison(NamedTuple):
    """An experiment that compares methods by batch size.

    Attributes:
        claim: what the paper says, as a sentence.
        drafter, models: whose figures of the paper stand beside; the first model where the rows' own is not among them.
    """

    experiment: str
    title: str
    claim: str
    drafter: str = ""
    models: Seq[str] = ("",)


_FIG1 = (
    "In the paper its method is faster than the vanilla one at every batch size, and the more so the larger the batch."
)
_ABLATION = "The paper's text says that unpadding the KV cache gains more; its Table 2, that unpadding the inputs does."
_LLMA = "In the paper the vanilla method's speed-up falls quickly with the batch size, that of its own more gradually."
_DRAFT = (
    "In the paper OPT-125m drafts 4 tokens for every row, and its method is faster than the vanilla one throughout."
)
_DATASETS = "The paper's appendix says that its method gains the more, the more is padded."

COMPARISONS = (
    Comparison("fig1", "Figure 1: speed-up by batch size", _FIG1, "llma", ["opt-6.7b"]),
    Comparison("ablation", "Table 2: unpadding the KV cache, the inputs, or both", _ABLATION, "llma", ["opt-6.7b"]),
    Comparison("llma_models", "Table 3: LLMA on models of several sizes", _LLMA, "llma", ["opt-2.7b", "opt-13b"]),
    Comparison(
        "draft_models", "Table 4: drafts by a draft model", _DRAFT, "draft_model", ["opt-2.7b", "opt-6.7b", "opt-13b"]
    ),
    Comparison("datasets", "Appendix: several datasets", _DATASETS, "draft_model", ["opt-13b"]),
)

_DATA = {"gsm8k": "GSM8K", "spec_math": "GSM8K", "mt_bench": "MT-Bench", "spec_mt_bench": "MT-Bench"}
"""Tasks with prompts of the paper's datasets; others stand beside those of CNN/Daily Mail."""


def comparison(material: Material, about: Comparison, name: str = "") -> Section | None:
    """A table and a plot for each setting, beside the paper's figures."""
    rows = material.of(about.experiment)
    if not rows:
        return None
    found, name = grids(rows), name or about.experiment
    section = begin(name, about.title, about.claim, rows)
    if name == "datasets":
        _datasets(section, found)
    for grid in found:
        model = grid.setting.model if grid.setting.model in about.models else about.models[0]
        data = _data(grid) if name == "datasets" else paper.CNN_DAILYMAIL
        printed, called = paper.SPEEDUPS.get((about.drafter, model, data), {}), f"{paper.label(model)}, {data}"
        theirs = {m: printed[m] for m in printed if any(cell.line.method == m for cell in grid.cells)}
        section.head(grid)
        section.table(speed_table(grid, theirs, called, _PADDED if name == "ablation" else {}))
        if name == "ablation":
            _balance(section, grid, printed)
        title = f"Speed-up by batch size: {grid.title}" + (f"; dashed, the paper's {called}" if theirs else "")
        section.draw(title, speed_chart(grid.title, [*speedup_curves(grid), *_dashed(theirs)], grid.mark))
    return section


def own(material: Material, known: Seq[str]) -> list[Section]:
    """Experiments that the paper does not have, and that have no section of their own."""
    names = dict.fromkeys(row.experiment for row in material.rows if row.experiment not in known)
    claim = "An experiment of your own; the paper has nothing to compare it with."
    about = [Comparison(name, f"Experiment {escape(name)}", claim) for name in names]
    return [section for i, each in enumerate(about) if (section := comparison(material, each, f"own{i}"))]


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
    """Which of the two unpaddings gains more, and what one padded input costs beside one lost slot."""
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
    """The paper's speed-ups."""
    return [
        Curve(
            f"paper: {Line(method).label}", {float(b): ratio for b, ratio in by_size.items()}, colour(method), "paper"
        )
        for method, by_size in theirs.items()
    ]


def _data(grid: Grid) -> str:
    return _DATA.get(grid.setting.data.partition(",")[0], paper.CNN_DAILYMAIL)


def _datasets(section: Section, found: Seq[Grid]) -> None:
    """All datasets at batch size 8, or the largest that all have, and the paper's beside."""
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
