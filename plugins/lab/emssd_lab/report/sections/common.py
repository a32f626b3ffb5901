"""Sections of a report: paragraphs, tables and plots."""

from __future__ import annotations

from typing import NamedTuple

from emssd.cli.busy import busy_remark
from emssd_lab.report.cells import Grid
from emssd_lab.report.tables import Table, escape, listed

__all__ = ["Plot", "Section"]


class Plot(NamedTuple):
    """A picture, its file's name without folder and ending, and its caption."""

    name: str
    title: str
    svg: str


class Section:
    """A section, written from its beginning to its end; `name` is that of its plots, which are numbered."""

    def __init__(self, name: str, title: str, *paragraphs: str) -> None:
        self.name, self.title = name, title
        self.blocks: list[str | Table | Plot] = [*paragraphs]

    def say(self, text: str) -> None:
        self.blocks.append(text)

    def head(self, grid: Grid, before: str = "") -> None:
        """A heading for one setting, with a warning of made-up weights or drafts."""
        self.say(f"### {escape(before + grid.title)}")
        replays = dict.fromkeys(row.replay for row in grid.rows.row if row.replay)
        weights = "**Random weights**: a made-up model of that shape; only its speed counts."
        drafts = f"**Replay**: drafts are spoiled copies of what the model will say ({escape(listed(replays))})."
        made_up = any(row.random_weights for row in grid.rows.row)
        if warnings := [weights] * made_up + [drafts] * bool(replays):
            self.say("> " + " ".join(warnings))

    def warn_if_busy(self, *shares: float | None) -> None:
        """The warning of a run on a busy machine, by the ``other_cpu_share`` of each run."""
        if remark := busy_remark(*({"other_cpu_share": share} for share in shares)):
            self.say(f"> **Warning**: {remark}.")

    def table(self, table: Table, above: str = "") -> None:
        """A table with a sentence above it, unless it is empty."""
        if table.lines:
            self.blocks += [above, table] if above else [table]

    def draw(self, title: str, svg: str) -> None:
        """A picture, beside the one before if there is nothing between them."""
        number = sum(isinstance(block, Plot) for block in self.blocks)
        self.blocks.append(Plot(f"{self.name}_{number}", title, svg))

    def markdown(self, report: str = "report") -> str:
        """All of it; the files of its plots begin with the name of the report."""
        shown, follows_plot = f"## {self.title}", False
        for block in self.blocks:
            shown += "\n" if follows_plot and isinstance(block, Plot) else "\n\n"
            if follows_plot := isinstance(block, Plot):
                shown += f"![{escape(block.title)}]({report}_{block.name}.svg)"
            else:
                shown += block.markdown() if isinstance(block, Table) else block
        return shown
