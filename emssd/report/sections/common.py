"""What sections of a report are made of, and what each of them says first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from emssd.report.cells import Cell, Grid
from emssd.report.figures import Curve, colour, curves
from emssd.report.rows import machine_name
from emssd.report.text import code, escape, listed, table

__all__ = ["Plot", "Section", "begin", "caveat", "grid_curves", "marked", "short_names", "speed_chart"]


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture.

    Attributes:
        name: of its file, without folder and ending; the report's own name is put before.
        alt: what it shows, for those who do not see it.
        svg: the picture.
    """

    name: str
    alt: str
    svg: str


@dataclass(slots=True)
class Section:
    """A section, written from its beginning to its end.

    Attributes:
        blocks: paragraphs and tables in Markdown, and groups of plots with their caption.
    """

    name: str
    title: str
    blocks: list[str | tuple[tuple[Plot, ...], str]] = field(default_factory=list)

    def say(self, *sentences: str) -> None:
        """A paragraph, or none if there is nothing to say."""
        if said := " ".join(filter(None, sentences)):
            self.blocks.append(said)

    def points(self, items: Iterable[str]) -> None:
        """A list."""
        if lines := [f"- {item}" for item in items]:
            self.blocks.append("\n".join(lines))

    def head(self, text: str) -> None:
        """A heading below the section's."""
        self.blocks.append(f"### {text}")

    def table(self, columns: Seq[str], lines: Iterable[Seq[str]], *, left: int = 1) -> None:
        """A table, see `emssd.report.text.table`."""
        self.blocks.append(table(columns, lines, left=left))

    def plots(self, plots: Iterable[Plot], caption: str) -> None:
        """Pictures side by side, where there is room."""
        self.blocks.append((tuple(plots), caption))


def begin(name: str, title: str, claim: str, provenances: Iterable[Mapping[str, Any]], repeats: int = 0) -> Section:
    """A section with what the paper claims and where the rows come from.

    Args:
        name: of its files.
        title: its heading.
        claim: of the paper, as a sentence.
        provenances: of all its rows.
        repeats: of each cell; 0 says nothing about them.
    """
    section, found = Section(name, title), list(provenances)
    section.say(claim)
    commands = listed(dict.fromkeys(code(each["command"]) for each in found))
    machines = listed(dict.fromkeys(escape(machine_name(each["hardware"])) for each in found))
    commits = listed(dict.fromkeys(_commit(each["commit"]) for each in found))
    versions = listed(dict.fromkeys(", ".join(f"{k} {v}" for k, v in each["versions"].items()) for each in found))
    counted = f"; {repeats} {'repeat' if repeats == 1 else 'repeats'}" if repeats else ""
    section.say(f"Measured: {commands} on {machines}; {commits}; {versions}{counted}.")
    return section


def _commit(commit: str | None) -> str:
    if commit is None:
        return "an installed version"
    return f"commit {commit.removesuffix('-dirty')} with changes" if commit.endswith("-dirty") else f"commit {commit}"


def caveat(grid: Grid) -> str:
    """What has to be said of rows with made-up weights or drafts, or ``""``."""
    said = []
    if "random weights" in grid.mark:
        said.append(
            "**Random weights**: a made-up model of that shape, whose text means nothing; only its speed counts."
        )
    if grid.replays:
        what = listed(escape(each) for each in grid.replays)
        said.append(
            f"**Replay**: drafts are no drafter's; they are spoiled copies of what the model will say ({what})."
        )
    return "> " + " ".join(said) if said else ""


def marked(mark: str) -> str:
    """`mark` as the last sentence of a caption, or ``""``."""
    return f" **{mark}**." if mark else ""


def short_names(found: Seq[Grid]) -> list[str]:
    """What legends call settings: model, drafter and data, or all of the title where that does not tell them apart."""
    names = [f"{grid.setting.model}, {grid.setting.drafter}, {grid.setting.data}" for grid in found]
    return [name if names.count(name) == 1 else grid.title for name, grid in zip(names, found, strict=True)]


def grid_curves(grid: Grid, value: Callable[[Cell], Any], *, methods: Seq[str | None] | None = None) -> list[Curve]:
    """A curve by batch size for each line of `grid`; `value` gives a `Spread`, or ``None`` where there is nothing."""
    found = []
    for index, line in enumerate(grid.lines):
        if methods is not None and line.method not in methods:
            continue
        spreads = {cell.batch_size: value(cell) for cell in grid.cells if cell.line == line}
        there = {size: spread for size, spread in spreads.items() if spread is not None}
        if there:
            points = {float(size): spread.median for size, spread in there.items()}
            ranges = {float(size): (spread.low, spread.high) for size, spread in there.items()}
            found.append(Curve(line.label, points, colour(line.method, index), ranges=ranges))
    return found


def speed_chart(grid: Grid, title: str, more: Iterable[Curve] = ()) -> str:
    """Speed-ups by batch size, plain greedy decoding being 1, and other curves beside."""
    lines = [*grid_curves(grid, lambda cell: cell.speedup), *more]
    return curves(title, "batch size / rows", "speed-up (plain greedy decoding = 1)", lines, mark=grid.mark, level=1.0)
