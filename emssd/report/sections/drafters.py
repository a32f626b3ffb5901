"""Drafters side by side, by kind of text: what each gains, and what of its drafts is accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq

from emssd.report.cells import Cell, Grid, grids, num_repeats
from emssd.report.lines import Line, Setting, setting_names, type_name
from emssd.report.sections.common import Section, begin, caveat
from emssd.report.sources import Material
from emssd.report.text import escape, listed

__all__ = ["drafters"]


def drafters(material: Material) -> Section | None:
    """A table of speed-ups and one of acceptance, for each model, batch size, backend and budget."""
    rows = [row for row in material.of("drafters") if row.speculate]
    if not rows:
        return None
    found = [grid for grid in grids(material.of("drafters")) if any(cell.line.speculate for cell in grid.cells)]
    several = len({cell.line for grid in found for cell in grid.cells if cell.line.speculate}) > 1
    claim = (
        f"Not in the paper: which drafter for which text. {'Those of a table' if several else 'All'} verify with the "
        "same backend; each is set against plain greedy decoding of the same text in the same repeat."
    )
    section = begin("drafters", "Drafters side by side", claim, (row.provenance for row in rows), num_repeats(found))
    groups: dict[tuple[Setting, int, Line], dict[tuple[str, str], Cell]] = {}
    for grid in found:
        section.say(caveat(grid))
        for cell in grid.cells:
            if cell.line.speculate:
                setting = dataclasses.replace(grid.setting, drafter="", data="", prompts=(0, 0))
                group = groups.setdefault((setting, cell.batch_size, cell.line), {})
                group[grid.setting.drafter, _text_of(grid)] = cell
    names = setting_names([setting for setting, _, _ in groups], lambda each: f"{each.model} · {type_name(each)}")
    for (setting, size, line), cells in groups.items():
        section.head(escape(f"{names[setting]} · batch size {size}" + (f" · {line.label}" if several else "")))
        section.say("Speed-up over plain greedy decoding, median (least–greatest):")
        _table(section, cells, _speedup)
        section.say("Mean acceptance length τ, and in brackets the share of drafted tokens that were accepted:")
        _table(section, cells, _accepted)
        section.points(_best(cells))
    return section


def _text_of(grid: Grid) -> str:
    return f"{grid.setting.data} ({grid.setting.prompts[0]})"


def _table(section: Section, cells: dict[tuple[str, str], Cell], figure: Callable[[Cell], str]) -> None:
    names, texts = _names(cells)
    lines = (
        [escape(name), *(figure(cells[name, text]) if (name, text) in cells else "" for text in texts)]
        for name in names
    )
    section.table(["drafter", *map(escape, texts)], lines)


def _names(cells: dict[tuple[str, str], Cell]) -> tuple[Seq[str], Seq[str]]:
    """Drafters and texts, each in the order of the rows."""
    return list(dict.fromkeys(name for name, _ in cells)), list(dict.fromkeys(text for _, text in cells))


def _speedup(cell: Cell) -> str:
    return "no baseline" if cell.speedup is None else cell.speedup.text()


def _accepted(cell: Cell) -> str:
    drafted = sum(
        sum(int(n) * count for n, count in row.metrics["draft_length_histogram"].items()) for row in cell.rows
    )
    accepted = sum(
        sum((int(tau) - 1) * count for tau, count in row.metrics["acceptance_histogram"].items()) for row in cell.rows
    )
    share = f" ({accepted / drafted:.0%})" if drafted else " (nothing drafted)"
    return f"{cell.spread('mean_acceptance_length').median:.2f}{share}"


def _best(cells: dict[tuple[str, str], Cell]) -> list[str]:
    """By text, which drafter is ahead, and which are not told apart from it by the repeats."""
    names, texts = _names(cells)
    said = []
    for text in texts:
        spreads = {name: cells[name, text].speedup for name in names if (name, text) in cells}
        ratios = {name: spread for name, spread in spreads.items() if spread is not None}
        if not ratios:
            continue
        best = max(ratios, key=lambda name: ratios[name].median)
        near = [escape(name) for name, spread in ratios.items() if name != best and spread.high >= ratios[best].low]
        also = f"; {listed(near)} {'is' if len(near) == 1 else 'are'} within the spread" if near else ""
        pays = "" if ratios[best].low > 1 else ", and not in every repeat faster than plain decoding"
        said.append(f"{escape(text)}: {escape(best)} is fastest, {ratios[best].text()}{pays}{also}.")
    return said
