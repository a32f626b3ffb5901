"""Sections of a report: paragraphs, tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from emssd.metrics.busy import busy_remark
from emssd.report.cells import Cell, Grid
from emssd.report.figures import Curve, colour
from emssd.report.rows import Row, Simulation
from emssd.report.tables import Table, code, escape, listed

__all__ = ["CELL", "About", "Plot", "Section", "begin", "marks_of", "short_names", "speedup_curves"]

CELL: dict[str, Callable[[Cell], str]] = {
    "batch": lambda cell: str(cell.batch_size),
    "method": lambda cell: cell.line.label,
}
"""The first two columns of a table of cells."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, its file's name without folder and ending, and what it shows."""

    name: str
    title: str
    svg: str


@dataclass(slots=True)
class Section:
    """A section, written from its beginning to its end.

    Attributes:
        name: of its plots, which are numbered.
        blocks: paragraphs in Markdown, tables and plots.
    """

    name: str
    title: str
    blocks: list[str | Table | Plot] = field(default_factory=list)

    def say(self, text: str) -> None:
        """A paragraph."""
        self.blocks.append(text)

    def head(self, grid: Grid, before: str = "") -> None:
        """A heading for one setting, with what has to be said of made-up weights or drafts."""
        self.say(f"### {escape(before + grid.title)}")
        replays = dict.fromkeys(row.replay for row in grid.rows if row.replay)
        weights = "**Random weights**: a made-up model of that shape; only its speed counts."
        drafts = f"**Replay**: drafts are spoiled copies of what the model will say ({escape(listed(replays))})."
        if said := [weights] * ("random weights" in grid.mark) + [drafts] * bool(replays):
            self.say("> " + " ".join(said))

    def warn_if_busy(self, *runs: Mapping[str, Any]) -> None:
        """The warning of a run on a busy machine, once for the metrics of all these runs."""
        if remark := busy_remark(*runs):
            self.say(f"> **Warning**: {remark}.")

    def table(self, table: Table) -> None:
        """A table, unless it is empty."""
        if table.lines:
            self.blocks.append(table)

    def draw(self, title: str, svg: str) -> None:
        """A picture, beside the one before if there is nothing between them."""
        number = sum(isinstance(block, Plot) for block in self.blocks)
        self.blocks.append(Plot(f"{self.name}_{number}", title, svg))

    def markdown(self, report: str = "report") -> str:
        """All of it; the files of its plots begin with the name of the report."""
        shown = f"## {self.title}"
        for before, block in zip([None, *self.blocks], self.blocks, strict=False):
            shown += "\n" if isinstance(before, Plot) and isinstance(block, Plot) else "\n\n"
            if isinstance(block, Plot):
                shown += f"![{escape(block.title)}]({report}_{block.name}.svg)"
            else:
                shown += block if isinstance(block, str) else block.markdown()
        return shown


class About(NamedTuple):
    """The section of an experiment: its rows, its title, what the paper says or what is shown, and its writer."""

    experiment: str
    title: str
    claim: str
    write: Callable[[Section, list[Row]], None]

    def section(self, rows: list[Row], name: str = "") -> Section | None:
        """The section of `rows`; ``None`` if there is nothing to show of them."""
        if not rows:
            return None
        section = begin(name or self.experiment, self.title, self.claim, rows)
        introduction = len(section.blocks)
        self.write(section, rows)
        return section if len(section.blocks) > introduction else None


def begin(name: str, title: str, claim: str, rows: Iterable[Row | Simulation]) -> Section:
    """A section that begins with what the paper says, or what is shown, and with the commands that made its rows."""
    found = list(rows)
    commands = listed(dict.fromkeys(code(row.provenance["command"]) for row in found))
    section = Section(name, title, [claim, f"Made by {commands}."])
    section.warn_if_busy(*(row.metrics for row in found if isinstance(row, Row)))
    return section


def marks_of(found: Iterable[Grid]) -> str:
    """The marks of these settings: random weights, replay."""
    return ", ".join(dict.fromkeys(grid.mark for grid in found if grid.mark))


def short_names(found: Seq[Grid]) -> list[str]:
    """Names of settings in legends: model, drafter and data, or the whole title if these are not unique."""
    names = [f"{grid.setting.model}, {grid.setting.drafter}, {grid.setting.data.partition(',')[0]}" for grid in found]
    return [name if names.count(name) == 1 else grid.title for name, grid in zip(names, found, strict=True)]


def speedup_curves(grid: Grid) -> list[Curve]:
    """A curve by batch size for each line that has speed-ups."""
    return [
        Curve(line.label, {cell.batch_size: cell.speedup for cell in cells if cell.speedup}, colour(line.method, index))
        for index, (line, cells) in enumerate(grid.by_line().items())
    ]
