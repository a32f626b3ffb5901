"""Appendix C: drafts by a draft model on several datasets."""

from __future__ import annotations

import statistics

from emssd.report import paper
from emssd.report.cells import Cell, Grid, Spread, grids, num_repeats
from emssd.report.figures import Curve, colour
from emssd.report.sections.common import Plot, Section, begin, caveat, marked, speed_chart
from emssd.report.sections.shape import say_why
from emssd.report.sections.speedups import advantage, speed_table
from emssd.report.sources import Material
from emssd.report.text import escape

__all__ = ["datasets"]

_NAMES = {
    "cnn_dailymail": paper.CNN_DAILYMAIL,
    "spec_summarization": paper.CNN_DAILYMAIL,
    "gsm8k": "GSM8K",
    "spec_math": "GSM8K",
    "mt_bench": "MT-Bench",
    "spec_mt_bench": "MT-Bench",
}  # of tasks with prompts of the paper's datasets; others stand beside those of CNN/Daily Mail
_COMMON = 8  # batch size of the paper's comparison


def datasets(material: Material) -> Section | None:
    """The two tables of the paper's appendix."""
    rows = material.of("datasets")
    if not rows:
        return None
    claim = (
        "The paper's appendix compares datasets with OPT-13b and OPT-125m, and says that its method gains the more, "
        "the more is padded: with the lengths of inputs and outputs and with how unevenly drafts are accepted."
    )
    found = grids(rows)
    section = begin(
        "datasets", "Appendix: several datasets", claim, (row.provenance for row in rows), num_repeats(found)
    )
    _compare(section, found)
    for index, grid in enumerate(found):
        data = _NAMES.get(grid.setting.data, paper.CNN_DAILYMAIL)
        section.head(escape(grid.title))
        section.say(caveat(grid))
        speed_table(section, grid, "draft_model", "opt-13b", data)
        section.points(advantage(grid))
        section.plots([Plot(f"datasets_{index}", f"Speed-up by batch size: {grid.title}", _chart(grid, data))],
                      f"Medians, bars from the least to the greatest repeat; dashed, the paper's OPT-13b on {data}."
                      + marked(grid.mark))  # fmt: skip
        say_why(section, grid, "draft_model", "opt-13b", data)
    wrong = paper.disagreements("appendix")
    section.say(f"The paper's tables of datasets disagree with themselves: {'; '.join(wrong)}." if wrong else "")
    return section


def _compare(section: Section, found: list[Grid]) -> None:
    """All datasets at one batch size, and the paper's beside."""
    common = set.intersection(*(set(grid.batch_sizes) for grid in found))
    if not common:
        section.say("The datasets have no batch size in common, so they are not compared with each other.")
        return
    size = _COMMON if _COMMON in common else max(common)
    lines, gains = [], []
    for grid in found:
        cells = [cell for cell in grid.cells if cell.batch_size == size]
        vanilla, ours = grid.get("vanilla", size), grid.get("unpad_both", size)
        shown = vanilla or ours or cells[0]
        padding = None if vanilla is None else vanilla.spread("padding_per_new_token").median
        row = shown.rows[0]
        name = escape(f"{grid.setting.model} · {grid.setting.drafter} · {grid.setting.data}")
        lines.append(
            [
                name + (f" ({grid.mark})" if grid.mark else ""),
                f"{statistics.mean(row.samples['num_prompt_tokens']):.0f}",
                f"{max(row.samples['num_new_tokens']):.0f}",
                "" if padding is None else f"{padding:.1%}",
                *map(_speedup, (vanilla, ours, grid.get("ragged", size) or grid.get("flashinfer", size))),
            ]
        )
        gain = grid.ratio("unpad_both", "vanilla", size)
        gains += [(padding, gain, name)] if padding is not None and gain is not None else []
    lines += [
        [f"*paper: {each.name}*", f"{each.input_length:.0f}", str(each.output_length), f"{each.padding_percent:.1f}%",
         f"{each.vanilla:.2f}", f"{each.ours:.2f}", ""]
        for each in paper.DATASETS
    ]  # fmt: skip
    section.say(f"At batch size {size}; the paper's are of batch size {_COMMON}:")
    section.table(
        [
            "data",
            "input length",
            "longest output",
            "padding / new token",
            "vanilla",
            "EMS-SD",
            "this project's backend",
        ],
        lines,
    )
    section.points(_judge(gains))


def _judge(gains: list[tuple[float, Spread, str]]) -> list[str]:
    """Whether more padding means more gain."""
    if len(gains) < 2:
        return []
    ordered = sorted(gains, key=lambda gain: gain[0])
    said = "; ".join(f"{name} {padding:.0%} padded, {gain.text()}" for padding, gain, name in ordered)
    medians = [gain.median for _, gain, _ in ordered]
    answer = "does" if medians == sorted(medians) else "does not"
    return [f"The gain over vanilla {answer} rise with the padding here: {said}."]


def _speedup(cell: Cell | None) -> str:
    return "" if cell is None or cell.speedup is None else cell.speedup.text()


def _chart(grid: Grid, data: str) -> str:
    more = []
    for method, label in (("vanilla", "vanilla"), ("unpad_both", "EMS-SD")):
        points = {float(size): ratio for size, ratio in paper.speedups("draft_model", "opt-13b", method, data).items()}
        more.append(Curve(f"paper, {data}: {label}", points, colour(method), "paper"))
    return speed_chart(grid, grid.title, more)
