"""Settings, their cells, medians over repeats, and speed-ups."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from emssd_lab.report.rows import Row
from emssd_lab.report.tables import grouped

__all__ = [
    "WITHOUT_BASELINE",
    "Cell",
    "Grid",
    "Line",
    "Setting",
    "Spread",
    "grids",
    "marks",
    "setting_names",
]

WITHOUT_BASELINE = ("padding_ratio", "acceptance", "step_time")
"""Experiments that count, or time single steps, and so run no plain greedy decoding."""

_BASELINES = dict.fromkeys(("vanilla", "unpad_kv", "unpad_inputs", "unpad_both"), "greedy")
_LABELS = {  # in the paper's order
    "greedy": "greedy",
    "vanilla": "vanilla",
    "unpad_kv": "unpad KV",
    "unpad_inputs": "unpad inputs",
    "unpad_both": "EMS-SD (both unpadded)",
    "ragged_greedy": "greedy on ragged",
    "ragged": "ragged",
    "flashinfer_greedy": "greedy on flashinfer",
    "flashinfer": "flashinfer",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of `count` repeats."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found), len(found))

    @classmethod
    def within_repeats(
        cls, above: Iterable[Row], below: Iterable[Row], figure: Callable[[Row], float]
    ) -> Spread | None:
        """The spread of a figure's ratios within each repeat of a file; ``None`` without a common repeat."""
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


class Setting(NamedTuple):
    """The common properties of the rows of a comparison, in words."""

    model: str
    drafter: str
    data: str
    dtype: str
    size: str
    batching: str
    machine: str
    length: str  # tokens of all prompts; those of another template or limit have other numbers
    options: tuple[str, ...]

    @classmethod
    def of(cls, row: Row) -> Setting:
        """The setting that `row` belongs to."""
        lengths = row.samples.num_prompt_tokens
        return cls(
            row.model,
            row.drafter_options,
            f"{row.data_label or row.data}, {len(lengths)} prompts, {row.max_new_tokens} new tokens",
            row.dtype + (", compiled" if row.compiled else ""),
            f"size {row.size}",
            f"{row.batching} batches",
            row.provenance.hardware.name,
            f"{int(sum(lengths))} tokens of prompts",
            row.options,
        )


def setting_names(settings: Iterable[Setting]) -> dict[Setting, str]:
    """Model, drafter, data and type of each setting; where these are the same, whatever differs is added."""
    found = {}
    for said, alike in grouped(dict.fromkeys(settings), lambda each: each[:4]).items():
        common = set.intersection(*(set(each.options) for each in alike))
        differing = [place for place in range(4, 8) if len({each[place] for each in alike}) > 1]
        for each in alike:
            parts = [*said, *(str(each[place]) for place in differing), *each.options]
            found[each] = " · ".join(part for part in parts if part and part not in common)
    return found


class Line(NamedTuple):
    """One of the things that a comparison compares at every batch size. Plain greedy decoding has no budget."""

    method: str | None  # none where the experiment names no methods
    speculate: bool = True
    backend: str = ""
    budget: str = ""

    @classmethod
    def of(cls, row: Row) -> Line:
        """The line that `row` belongs to."""
        return cls(row.method, row.speculate, row.backend_options, row.budget_options if row.speculate else "")

    @property
    def label(self) -> str:
        """Its name in tables and legends."""
        return _LABELS.get(self.method or "", self.method or f"{self.budget or 'greedy'} on {self.backend}")

    @property
    def rank(self) -> tuple[int, str, bool, str]:
        """Sorts lines as the paper lists them."""
        known = list(_LABELS).index(self.method) if self.method in _LABELS else len(_LABELS)
        return (known, self.backend, self.speculate, self.budget or self.method or "")

    @property
    def baseline(self) -> str | None:
        """The method whose rows are its baseline; ``None`` where the experiment names no methods."""
        return None if self.method is None else _BASELINES.get(self.method, f"{self.method}_greedy")


@dataclass(frozen=True, slots=True)
class Cell:
    """The repeats of one line at one batch size.

    Attributes:
        speedup: ratio to the row's own baseline within each repeat; ``None`` for a baseline, and where none was run.
    """

    line: Line
    batch_size: int
    rows: tuple[Row, ...]
    speedup: Spread | None

    def spread(self, figure: str | Callable[[Row], float]) -> Spread:
        """The spread of a metric, given by name, or of a function of rows."""
        return Spread.of(figure(row) if callable(figure) else float(getattr(row.metrics, figure)) for row in self.rows)

    def median(self, figure: str | Callable[[Row], float], form: str = ".2f") -> str:
        """The median of a `spread`, as text."""
        return format(self.spread(figure).median, form)

    def total(self, histogram: str) -> Counter[int]:
        """A histogram among the metrics, summed over the repeats; without what was counted 0 times."""
        counts = Counter[int]()
        for row in self.rows:
            counts.update({int(number): count for number, count in getattr(row.metrics, histogram).items() if count})
        return counts

    @property
    def place(self) -> dict[str, str | None]:
        """The first two columns of a table of cells."""
        return {"batch": str(self.batch_size), "method": self.line.label}

    @property
    def speedup_text(self) -> str | None:
        """The speed-up, and in how many repeats there is a baseline if not in all."""
        spread, number = self.speedup, len(self.rows)
        if spread is None:
            wanted = self.line.speculate and self.rows[0].experiment not in WITHOUT_BASELINE
            return "no baseline" if wanted else None
        return spread.text() + (f", baseline in {spread.count} of {number} repeats" if spread.count < number else "")


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells of one setting, by batch size and line, with its name among those of `setting_names`."""

    setting: Setting
    name: str
    cells: tuple[Cell, ...]

    @property
    def rows(self) -> list[Row]:
        """The rows of all cells."""
        return [row for cell in self.cells for row in cell.rows]

    @property
    def mark(self) -> str:
        """The marks of its rows."""
        return marks(self.rows)

    @property
    def title(self) -> str:
        """Its name, with what has to be said of it."""
        return f"{self.name} ({self.mark})" if self.mark else self.name

    def by_line(self) -> dict[Line, list[Cell]]:
        """The cells of each line from the smallest batch size on, in the order of the paper."""
        return dict(sorted(grouped(self.cells, lambda cell: cell.line).items(), key=lambda item: item[0].rank))

    def get(self, method: str | None, batch_size: int) -> Cell | None:
        """The cell of a method."""
        found = (cell for cell in self.cells if (cell.line.method, cell.batch_size) == (method, batch_size))
        return next(found, None)

    def ratio(self, above: str | None, below: str, batch_size: int) -> str | None:
        """Tokens/s of one method ÷ those of another within each repeat; ``None`` if either was not run."""
        top, bottom = self.get(above, batch_size), self.get(below, batch_size)
        ratio = Spread.within_repeats(top.rows, bottom.rows, lambda row: row.rate) if top and bottom else None
        return ratio.text() if ratio else None


def marks(rows: Iterable[Row]) -> str:
    """``""``, or what every title and legend has to say of weights or drafts that are made up."""
    found = list(rows)
    made_up = any(row.random_weights for row in found)
    return ", ".join(["random weights"] * made_up + ["replay"] * any(row.replay for row in found))


def grids(rows: Iterable[Row], setting: Callable[[Row], Setting] = Setting.of) -> list[Grid]:
    """Rows by what may be compared: those of a `setting`."""
    by_setting = grouped(rows, setting)
    baselines = grouped((row for mine in by_setting.values() for row in mine if not row.speculate), _key)
    names, found = setting_names(by_setting), []
    for each, mine in by_setting.items():
        cells = []
        for (size, line), repeats in grouped(mine, lambda row: (row.batch_size, Line.of(row))).items():
            bases = [_baseline(row, line, baselines.get(_key(row), ())) for row in repeats]
            ratios = [row.rate / base for row, base in zip(repeats, bases, strict=True) if base]
            cells.append(Cell(line, size, tuple(repeats), Spread.of(ratios) if ratios else None))
        found.append(Grid(each, names[each], tuple(sorted(cells, key=lambda cell: (cell.batch_size, cell.line.rank)))))
    return found


def _key(row: Row) -> tuple[object, ...]:
    """A key that a row shares with its baseline: all but the drafter."""
    return (row.source, row.repeat, row.batch_size, Setting.of(row)._replace(drafter=""))


def _baseline(row: Row, line: Line, others: Seq[Row]) -> float | None:
    """Tokens/s of plain greedy decoding with the same kernels; that of the same drafter's sweep is preferred."""
    if not row.speculate:
        return None
    if line.method is None:
        found = [other for other in others if other.backend_options == row.backend_options]
    else:
        found = [other for other in others if other.method == line.baseline]
    nearest = [other for other in found if other.drafter_options == row.drafter_options] or found
    return statistics.median(other.rate for other in nearest) if nearest else None
