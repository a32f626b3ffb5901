"""Cells of an experiment: medians over repeats, their spread, and speed-ups against each row's own baseline."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from emssd.report.lines import Line, Setting, baseline_method, setting_names
from emssd.report.rows import Row
from emssd.report.text import listed

__all__ = ["Cell", "Grid", "Spread", "grids", "num_repeats"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of `count` repeats."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found), len(found))

    @classmethod
    def within_repeats(
        cls, above: Iterable[Row], below: Iterable[Row], figure: Callable[[Row], float]
    ) -> Spread | None:
        """Of the ratios of a figure within each repeat of a file; ``None`` if they have no repeat in common."""
        values = {(row.source, row.repeat): figure(row) for row in below}
        ratios = [figure(row) / value for row in above if (value := values.get((row.source, row.repeat)))]
        return cls.of(ratios) if ratios else None

    def covers(self, value: float) -> bool:
        """Whether repeats are on both sides of `value`, or at it; a single repeat covers nothing but itself."""
        return self.low <= value <= self.high

    def text(self, form: str = ".2f") -> str:
        """As in ``1.37 (1.20–1.52)``; of a single repeat only the value."""
        middle = format(self.median, form)
        return f"{middle} ({self.low:{form}}–{self.high:{form}})" if self.count > 1 else middle


@dataclass(frozen=True, slots=True)
class Cell:
    """The repeats of one line at one batch size.

    Attributes:
        baselines: of each row, tokens/s of its own baseline in the same repeat; ``None`` where there is none.
    """

    line: Line
    batch_size: int
    rows: tuple[Row, ...]
    baselines: tuple[float | None, ...]

    def spread(self, figure: str | Callable[[Row], float]) -> Spread:
        """Of a metric, by name, or of a function of rows."""
        return Spread.of(figure(row) if callable(figure) else float(row.metrics[figure]) for row in self.rows)

    @property
    def tokens_per_second(self) -> Spread:
        """Of decode steps."""
        return self.spread("decode_tokens_per_second")

    @property
    def speedup(self) -> Spread | None:
        """Ratio to the baseline within each repeat; ``None`` for a baseline, and where none was run."""
        if not self.line.speculate:
            return None
        pairs = [(_rate(row), base) for row, base in zip(self.rows, self.baselines, strict=True) if base]
        return Spread.of(rate / base for rate, base in pairs) if pairs else None

    @property
    def missing(self) -> str | None:
        """Which baseline is not there."""
        without = [row for row, base in zip(self.rows, self.baselines, strict=True) if not base]
        if not self.line.speculate or not without:
            return None
        wanted = baseline_method(self.line.method) or f"any, backend={self.line.backend}"
        repeats = ", ".join(str(row.repeat) for row in without)
        return f"no baseline: no row of plain greedy decoding (method {wanted}) in repeat {repeats}"


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells of one setting.

    Attributes:
        name: model, drafter, data and type, and whatever else tells it from the other settings.
        mark: ``""``, or what every title, legend and caption has to say: random weights, replay.
        replays: in words, what is replayed.
    """

    setting: Setting
    name: str
    cells: tuple[Cell, ...]
    mark: str
    replays: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its name, with what has to be said of it."""
        return f"{self.name} ({self.mark})" if self.mark else self.name

    @property
    def lines(self) -> list[Line]:
        """In the order of the paper."""
        return sorted({cell.line for cell in self.cells}, key=lambda line: line.rank)

    @property
    def batch_sizes(self) -> list[int]:
        """From the smallest."""
        return sorted({cell.batch_size for cell in self.cells})

    @property
    def rows(self) -> list[Row]:
        """Of all cells."""
        return [row for cell in self.cells for row in cell.rows]

    @property
    def missing(self) -> list[str]:
        """Which baselines are not there; cells that lack the same are named together."""
        lacking: dict[tuple[Line, str], list[int]] = {}
        for cell in self.cells:
            if cell.missing:
                lacking.setdefault((cell.line, cell.missing), []).append(cell.batch_size)
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for (line, missing), sizes in lacking.items():
            alike.setdefault((missing, tuple(sizes)), []).append(line.label)
        return [
            f"{listed(labels)} at batch size {listed(sizes)}: {missing}" for (missing, sizes), labels in alike.items()
        ]

    def get(self, line: Line | str, batch_size: int) -> Cell | None:
        """The cell of a line, or of a method by name."""
        for cell in self.cells:
            if cell.batch_size == batch_size and line in (cell.line, cell.line.method):
                return cell
        return None

    def ratio(self, above: str, below: str, batch_size: int) -> Spread | None:
        """Tokens/s of one method ÷ those of another within each repeat; ``None`` if either was not run."""
        top, bottom = self.get(above, batch_size), self.get(below, batch_size)
        if top is None or bottom is None:
            return None
        return Spread.within_repeats(top.rows, bottom.rows, _rate)


def grids(rows: Iterable[Row]) -> list[Grid]:
    """Rows by what may be compared."""
    by_setting: dict[Setting, dict[tuple[int, Line], list[Row]]] = {}
    baselines: dict[_Key, list[Row]] = {}
    for row in rows:
        if not row.speculate:
            baselines.setdefault(_key(row), []).append(row)
        by_setting.setdefault(Setting.of(row), {}).setdefault((row.batch_size, Line.of(row)), []).append(row)
    found, names = [], setting_names(list(by_setting))
    for setting, cells in by_setting.items():
        made = [
            Cell(line, batch_size, tuple(repeats), tuple(_baseline(row, baselines) for row in repeats))
            for (batch_size, line), repeats in sorted(cells.items(), key=lambda item: (item[0][0], item[0][1].rank))
        ]
        members = [row for repeats in cells.values() for row in repeats]
        replays = tuple(dict.fromkeys(row.replay for row in members if row.replay))
        marks = ["random weights"] * any(row.random_weights for row in members) + ["replay"] * bool(replays)
        found.append(Grid(setting, names[setting], tuple(made), ", ".join(marks), replays))
    return found


def num_repeats(found: Iterable[Grid]) -> int:
    """Repeats of the cell that has the most."""
    return max(len(cell.rows) for grid in found for cell in grid.cells)


_Key = tuple[object, ...]


def _baseline(row: Row, baselines: dict[_Key, list[Row]]) -> float | None:
    """Tokens/s of plain greedy decoding in the same repeat, with the same kernels."""
    method, found = baseline_method(row.method), []
    for other in baselines.get(_key(row), ()) if row.speculate else ():
        if other.method == method if method is not None else other.backend_options == row.backend_options:
            found.append(other)
    nearest = [other for other in found if other.drafter_options == row.drafter_options] or found
    return statistics.median(map(_rate, nearest)) if nearest else None


def _key(row: Row) -> _Key:
    """What a row and its baseline have in common: all but the drafter."""
    setting = dataclasses.replace(Setting.of(row), drafter="")
    return (row.source, row.repeat, row.batch_size, setting)


def _rate(row: Row) -> float:
    return float(row.metrics["decode_tokens_per_second"])
