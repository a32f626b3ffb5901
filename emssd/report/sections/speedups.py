"""Sections that compare methods by batch size: Figure 1, Tables 3 and 4, and a user's own comparisons."""

from __future__ import annotations

from collections.abc import Iterable

from emssd.report import paper
from emssd.report.cells import Grid, grids, num_repeats
from emssd.report.figures import Curve, colour
from emssd.report.rows import Row
from emssd.report.sections.common import Plot, Section, begin, caveat, marked, speed_chart
from emssd.report.sections.shape import say_why
from emssd.report.sources import Material
from emssd.report.text import escape

__all__ = ["advantage", "draft_models", "fig1", "llma_models", "own", "speed_table"]

_KNOWN = ("fig1", "ablation", "llma_models", "draft_models", "padding_ratio", "acceptance", "step_time", "datasets",
         "appendix", "crossover", "drafters")  # fmt: skip


def fig1(material: Material) -> Section | None:
    """Figure 1: speed-up by batch size."""
    claim = (
        "The paper's Figure 1 shows OPT-6.7b with LLMA on CNN/Daily Mail: its method is faster than the vanilla one at "
        "every batch size, and the more so the larger the batch."
    )
    return _compared("fig1", "Figure 1: speed-up by batch size", claim, material.of("fig1"), "llma", ("opt-6.7b",))


def llma_models(material: Material) -> Section | None:
    """Table 3: LLMA on other models."""
    claim = (
        "The paper's Table 3 shows LLMA with OPT-2.7b and OPT-13b: the vanilla method's speed-up falls quickly with "
        "the batch size, that of its own more gradually."
    )
    title = "Table 3: LLMA on models of several sizes"
    return _compared("llma_models", title, claim, material.of("llma_models"), "llma", ("opt-2.7b", "opt-13b"))


def draft_models(material: Material) -> Section | None:
    """Table 4: a draft model."""
    claim = (
        "The paper's Table 4 shows OPT-125m drafting 4 tokens for three models: all rows have drafts of one length, so "
        "only the KV cache is left to be unpadded, and its method is faster than the vanilla one throughout."
    )
    models = ("opt-2.7b", "opt-6.7b", "opt-13b")
    title = "Table 4: drafts by a draft model"
    return _compared("draft_models", title, claim, material.of("draft_models"), "draft_model", models)


def own(material: Material) -> list[Section]:
    """Experiments that the paper does not have."""
    names = dict.fromkeys(row.experiment for row in material.rows if row.experiment not in _KNOWN)
    found = []
    for index, name in enumerate(names):
        claim = "An experiment of your own; the paper has nothing to compare it with."
        section = _compared(f"own{index}", f"Experiment {escape(name)}", claim, material.of(name), "", ())
        found += [section] if section else []
    return found


def _compared(
    name: str, title: str, claim: str, rows: list[Row], drafter: str, models: tuple[str, ...]
) -> Section | None:
    if not rows:
        return None
    found = grids(rows)
    section = begin(name, title, claim, (row.provenance for row in rows), num_repeats(found))
    for index, grid in enumerate(found):
        section.head(escape(grid.title))
        section.say(caveat(grid))
        theirs = grid.setting.model if grid.setting.model in models else (models[0] if models else "")
        speed_table(section, grid, drafter, theirs)
        section.points(advantage(grid))
        plot = Plot(f"{name}_{index}", f"Speed-up by batch size: {grid.title}", _chart(grid, drafter, theirs))
        beside = f"; dashed, the paper's {paper.label(theirs)}" if theirs else ""
        section.plots([plot], f"Medians, bars from the least to the greatest repeat{beside}.{marked(grid.mark)}")
        if theirs:
            say_why(section, grid, drafter, theirs)
    _paper_table(section, drafter, models)
    return section


def speed_table(section: Section, grid: Grid, drafter: str, model: str, data: str = paper.CNN_DAILYMAIL) -> None:
    """Tokens/s, speed-up and padding of all cells, the paper's speed-up where it has one, and what is missing."""
    lines, theirs_there = [], False
    for cell in sorted(grid.cells, key=lambda each: (each.batch_size, each.line.rank)):
        theirs = paper.speedups(drafter, model, cell.line.method or "", data).get(cell.batch_size)
        theirs_there |= theirs is not None
        lines.append(
            [
                str(cell.batch_size),
                escape(cell.line.label),
                cell.tokens_per_second.text(",.0f"),
                "" if cell.speedup is None else f"{cell.speedup.text()}",
                f"{cell.spread('mean_acceptance_length').median:.2f}",
                f"{cell.spread('padding_per_new_token').median:.0%}",
                "" if theirs is None else f"{theirs:.2f}",
            ]
        )
    columns = ["batch", "method", "tokens/s (min–max)", "speed-up (min–max)", "τ", "padding / new token"]
    columns += [f"paper's speed-up, {paper.label(model)}"] if theirs_there else []
    section.table(columns, (line[: len(columns)] for line in lines), left=2)
    section.points(escape(missing) + ". Such a speed-up is left out." for missing in grid.missing)


def advantage(grid: Grid) -> list[str]:
    """Whether the unpadded method beats the vanilla one, and whether that grows with the batch, in sentences."""
    ratios = {size: ratio for size in grid.batch_sizes if (ratio := grid.ratio("unpad_both", "vanilla", size))}
    if not ratios:
        return []
    said = ", ".join(f"{ratio.text()} (batch {size})" for size, ratio in ratios.items())
    ahead = [size for size, ratio in ratios.items() if ratio.low > 1 and ratio.count > 1]
    behind = [size for size, ratio in ratios.items() if ratio.high < 1 and ratio.count > 1]
    judged = f"It is ahead in every repeat at {_sizes(ahead)}" + (f", behind at {_sizes(behind)}." if behind else ".")
    if max(ratio.count for ratio in ratios.values()) == 1:
        judged = "One repeat: nothing is known of the spread."
    found = [f"Tokens/s of the paper's method ÷ those of the vanilla one, on the same kernels: {said}. {judged}"]
    if len(ratios) > 1 and max(ratio.count for ratio in ratios.values()) > 1:
        sizes = sorted(ratios)
        first, last = ratios[sizes[0]], ratios[sizes[-1]]
        grows = (
            "grows"
            if last.low > first.high
            else "shrinks"
            if last.high < first.low
            else "does not change beyond the spread"
        )
        found.append(f"From batch size {sizes[0]} to {sizes[-1]} that advantage {grows}.")
    return found


def _sizes(sizes: list[int]) -> str:
    return "batch size " + ", ".join(map(str, sizes)) if sizes else "no batch size"


def _chart(grid: Grid, drafter: str, model: str) -> str:
    more = []
    for method, label in (("vanilla", "vanilla"), ("unpad_both", "EMS-SD")) if model else ():
        points = {float(size): ratio for size, ratio in paper.speedups(drafter, model, method).items()}
        more.append(Curve(f"paper, {paper.label(model)}: {label}", points, colour(method), "paper"))
    return speed_chart(grid, grid.title, more)


def _paper_table(section: Section, drafter: str, models: Iterable[str]) -> None:
    """The paper's speed-ups, and where its tables contradict themselves."""
    by_model = {m: [paper.speedups(drafter, m, method) for method in ("vanilla", "unpad_both")] for m in models}
    if not by_model:
        return
    sizes = sorted({size for columns in by_model.values() for column in columns for size in column})
    section.say("The paper's speed-ups (A100; OPT-13b on two):")
    columns = ["batch", *(f"{paper.label(m)} {what}" for m in by_model for what in ("vanilla", "EMS-SD"))]
    section.table(
        columns,
        ([str(s), *(f"{c[s]:.2f}" if s in c else "" for pair in by_model.values() for c in pair)] for s in sizes),
    )
    tables = {"llma_models": "Table 3", "draft_models": "Table 4", "fig1": "Table 2"}
    wrong = paper.disagreements(tables.get(section.name, "none"))
    section.say(f"Its tables disagree with themselves: {'; '.join(wrong)}." if wrong else "")
