"""Rows as a data frame: the settings that may be compared, the cells in them, and their speed-ups."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from emssd_lab.report.rows import Row
from emssd_lab.report.tables import Table

__all__ = [
    "Grid", "Setting", "Spread", "frame", "grids", "line_name", "marks", "over", "setting_names", "speedup_text",
    "speedups", "spread_text", "table_of",
]  # fmt: skip

WITHOUT_BASELINE = ("padding_ratio", "acceptance", "step_time")
"""Experiments that count, or time single steps, and so run no plain greedy decoding."""

_REPEAT = ["source", "repeat"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of `count` repeats."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of all numbers; ``None`` where there are none."""
        numbers = pd.Series(values, dtype=float).dropna()
        return cls(numbers.median(), numbers.min(), numbers.max(), len(numbers)) if len(numbers) else None

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
    """Model, drafter, data and type of each setting; where these are the same, every other property that differs."""
    names = {}
    distinct = list(dict.fromkeys(settings))
    for setting in distinct:
        alike = [other for other in distinct if other[:4] == setting[:4]]
        common = set.intersection(*(set(other.options) for other in alike))
        differing = [setting[i] for i in range(4, 8) if len({other[i] for other in alike}) > 1]
        parts = [*setting[:4], *differing, *setting.options]
        names[setting] = " · ".join(str(part) for part in parts if part and part not in common)
    return names


@cache
def methods() -> dict[str, dict[str, str]]:
    """The table of methods, in the paper's order."""
    return tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))


def line_name(method: str | None, backend: str = "", budget: str = "") -> str:
    """The name of a method in tables and legends; without one, its budget and backend. Plain decoding has no budget."""
    return methods().get(method or "", {}).get("name") or method or f"{budget or 'greedy'} on {backend}"


def frame(measured: Iterable[Row]) -> pd.DataFrame:
    """A line for each row: the row itself, its metrics, costs and rates by their names, and these columns.

    ``setting``; ``line``, the name of what is compared at every batch size, and ``rank``, by which the paper would sort
    it; ``speedup`` over plain greedy decoding with the same kernels, of the same file and repeat, if that was run.
    """
    rows = pd.DataFrame([_line(row) for row in measured])
    ranks = sorted(set(rows["rank"]))
    rows["rank"] = rows["rank"].map(ranks.index)
    rows["drafter"] = [setting.drafter for setting in rows.setting]
    rows["rest"] = [setting._replace(drafter="") for setting in rows.setting]
    plain = rows[~rows.speculate]
    kernels = [f"on {row.backend_options}" for row in plain.row]
    bases = pd.concat([plain.assign(base=plain.method), plain.assign(base=kernels)])
    key, rate = [*_REPEAT, "batch_size", "rest", "base"], pd.Series(float("nan"), rows.index)
    for names in ([*key, "drafter"], key):  # the baseline of the same drafter's sweep is preferred
        rate = rate.fillna(rows.join(bases.groupby(names).rate.median().rename("plain_rate"), on=names).plain_rate)
    return rows.assign(speedup=(rows.rate / rate.where(rate > 0)).where(rows.speculate))


def _line(row: Row) -> dict[str, Any]:
    budget = row.budget_options if row.speculate else ""
    order = [*methods(), row.method].index(row.method)
    base = None if row.method is None else methods().get(row.method, {}).get("baseline", f"{row.method}_greedy")
    origin = msgspec.structs.asdict(row.provenance.hardware)
    return {**msgspec.structs.asdict(row.metrics), **asdict(row.costs), **origin} | {
        "row": row, "setting": Setting.of(row), "line": line_name(row.method, row.backend_options, budget),
        "rank": (order, row.backend_options, row.speculate, budget or row.method or ""),
        "base": base or f"on {row.backend_options}", "rate": row.metrics.decode_tokens_per_second,
        **{name: getattr(row, name) for name in (*_REPEAT, "experiment", "method", "speculate", "batch_size")},
    }  # fmt: skip


def over(above: pd.DataFrame, below: pd.DataFrame, column: str = "rate") -> pd.Series:
    """For the rows `above`, their ratio of a column to the row `below` of the same repeat, file and batch size."""
    key = [*_REPEAT, "batch_size"]
    values = above.join(below.groupby(key)[column].last().rename("below"), on=key).below
    return above[column] / values.where(values > 0)


class Grid(NamedTuple):
    """The rows of one setting, with its name among those of `setting_names`."""

    setting: Setting
    name: str
    rows: pd.DataFrame

    @property
    def mark(self) -> str:
        return marks(self.rows)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.mark})" if self.mark else self.name

    def cells(self, **columns: pd.Series) -> Any:
        """The repeats of each line at each batch size, grouped in the order of tables, with more columns."""
        return self.rows.assign(**columns).groupby(["batch_size", "rank"])

    def lines(self) -> dict[str, pd.DataFrame]:
        """By the name of each line its rows, in the paper's order."""
        return {rows.line.iloc[0]: rows for _, rows in self.rows.groupby("rank")}

    def of(self, method: str) -> pd.DataFrame:
        return self.rows[self.rows.method == method]


def spread_text(values: pd.Series, form: str = ".2f") -> str | None:
    """The text of the spread of these numbers."""
    spread = Spread.of(values)
    return spread.text(form) if spread else None


def table_of(cells: Any, columns: Mapping[str, Any]) -> Table:
    """A table of all cells: batch size, method, and these columns."""
    lines = cells.line.first()
    sizes = [str(size) for size, _ in lines.index]
    return Table.of(pd.DataFrame({"batch": sizes, "method": lines, **columns}), left=2)


def speedup_text(cell: pd.DataFrame) -> str | None:
    """The speed-up, and in how many repeats there is a baseline if not in all; ``None`` of what is one itself."""
    spread, first = Spread.of(cell.speedup), cell.iloc[0]
    if spread is None:
        return "no baseline" if first.speculate and first.experiment not in WITHOUT_BASELINE else None
    missing = f", baseline in {spread.count} of {len(cell)} repeats" if spread.count < len(cell) else ""
    return spread.text() + missing


def speedups(rows: pd.DataFrame) -> dict[int, Spread]:
    """The speed-ups of a line by batch size, where it has any."""
    by_size = {size: Spread.of(cell.speedup) for size, cell in rows.groupby("batch_size")}
    return {size: spread for size, spread in by_size.items() if spread}


def marks(rows: pd.DataFrame) -> str:
    """``""``, or what every title and legend has to say of weights or drafts that are made up."""
    made_up = any(row.random_weights for row in rows.row)
    return ", ".join(["random weights"] * made_up + ["replay"] * any(row.replay for row in rows.row))


def grids(rows: pd.DataFrame) -> list[Grid]:
    """The rows of a `frame` by their setting: only rows of one may be compared."""
    names = setting_names(rows.setting)
    return [Grid(key, names[key], mine) for key, mine in rows.groupby("setting", sort=False)]
