"""Up to which batch size speculation pays, and what to run at each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from emssd.report.cells import Grid, grids, num_repeats
from emssd.report.crossing import best_cell, speedups, verdict
from emssd.report.lines import baseline_method
from emssd.report.rows import Row
from emssd.report.sections.common import Plot, Section, begin, caveat, marked, speed_chart
from emssd.report.sections.speedups import speed_table
from emssd.report.sources import Material
from emssd.report.text import code, escape, listed

__all__ = ["command_for", "crossover"]

_OF_THE_SWEEP = (
    "experiment",
    "size",
    "output_dir",
    "repeat",
    "method",
    "overwrite",
    "resume",
    "progress",
    "batch_size",
)


def crossover(material: Material) -> Section | None:
    """The batch size at which speculation stops paying, in words, and at each the setting of the largest speed-up."""
    rows = material.of("crossover")
    if not rows:
        return None
    claim = (
        "The paper's speed-ups fall with the batch size, and below 1 for the vanilla method. Up to which batch size "
        "speculation pays is measured here for one model, machine and kind of prompts."
    )
    found = grids(rows)
    title = "Crossover: where speculation stops paying"
    section = begin("crossover", title, claim, (row.provenance for row in rows), num_repeats(found))
    for index, grid in enumerate(found):
        section.head(escape(grid.title))
        section.say(caveat(grid))
        by_line = {line.label: speedups(grid, line) for line in grid.lines}
        section.points(escape(verdict(name, values)) for name, values in by_line.items() if values)
        section.say("What to run at each batch size:")
        section.table(["batch", "speed-up", "use", "command"], _advice(grid), left=4)
        speed_table(section, grid, "", "")
        plot = Plot(f"crossover_{index}", f"Speed-up by batch size: {grid.title}", speed_chart(grid, grid.title))
        section.plots(
            [plot],
            f"Medians, bars from the least to the greatest repeat; crossings by log batch size.{marked(grid.mark)}",
        )
    return section


def _advice(grid: Grid) -> Iterable[list[str]]:
    for size in grid.batch_sizes:
        best = best_cell(grid, size)
        if best is None or best.speedup is None:
            yield [str(size), "", f"not known: {_missing(grid, size)}", ""]
            continue
        gain, row = best.speedup, best.rows[0]
        note = " (one repeat)" if gain.count == 1 else " (too close to call)" if gain.covers(1) else ""
        without = [line.label for line in grid.lines if line.speculate and size not in speedups(grid, line)]
        note += f"; not compared: {escape(listed(without))}" if without else ""
        if gain.median > 1:
            use = escape(f"{row.drafter_options}, budget {row.budget_options}")
            yield [str(size), gain.text(), use + note, code(command_for(row))]
        else:
            yield [str(size), "1", "plain greedy decoding" + note, code(command_for(row, speculate=False))]


def _missing(grid: Grid, batch_size: int) -> str:
    """Why nothing can be compared."""
    if not any(cell.line.speculate for cell in grid.cells if cell.batch_size == batch_size):
        return "nothing but plain greedy decoding was run"
    return "no row of plain greedy decoding to compare with"


def command_for(row: Row, *, speculate: bool = True) -> str:
    """The command line of a run like the speculating `row`, without the sweep; or of its baseline."""
    chosen = {"drafter": row.drafter, "budget": row.budget} if speculate else {"drafter": "none"}
    if row.method is not None:  # a method sets its backend; those of the experiment itself, only what is chosen above
        chosen["method"] = row.method if speculate else str(baseline_method(row.method))
    left_out = _OF_THE_SWEEP if speculate else (*_OF_THE_SWEEP, "drafter", "budget")
    kept = [item for item in row.overrides if re.split(r"[.=]", item.lstrip("+~"))[0] not in left_out]
    given = {item.partition("=")[0] for item in kept}  # a preset, of which a row has only the plugin's name
    added = [f"{group}={name}" for group, name in chosen.items() if group not in given]
    words = ["python", "-m", "emssd", *_presets(row), *kept, *added, f"batch_size={row.batch_size}"]
    return shlex.join(words)


def _presets(row: Row) -> list[str]:
    """The option that names a folder of presets, which is no override."""
    words = shlex.split(row.provenance["command"])
    for place, word in enumerate(words):
        name, given, _ = word.partition("=")
        if name in ("--config-dir", "-cd"):
            return words[place : place + (1 if given else 2)]
    return []
