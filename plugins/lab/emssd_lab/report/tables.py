"""Tables of texts, shown alike on the console and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pandas as pd
import rich.table
from rich.text import Text

__all__ = ["Code", "Table", "code", "escape", "listed", "pairs", "pivot"]


class Code(str):
    """A cell that holds code."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and lines of plain text; all but the first `left` columns are aligned to the right."""

    columns: Seq[str]
    lines: Seq[Seq[str]]
    left: int = 1

    @classmethod
    def of(cls, lines: pd.DataFrame | Iterable[Mapping[str, str | None]], left: int = 1) -> Table:
        """A data frame, or the texts of each line by their columns. A column without any text is left out."""
        frame = pd.DataFrame(lines if isinstance(lines, pd.DataFrame) else list(lines)).astype(object)
        texts = frame.dropna(axis=1, how="all").fillna("")
        return cls([*texts], texts.to_numpy().tolist(), left)

    def markdown(self) -> str:
        """As Markdown that shows each cell as it is."""
        rules = [":--"] * self.left + ["--:"] * (len(self.columns) - self.left)
        shown = [
            [(code if isinstance(cell, Code) else escape)(cell).replace("|", "\\|") for cell in cells]
            for cells in (self.columns, *self.lines)
        ]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in [shown[0], rules, *shown[1:]])

    def console(self) -> rich.table.Table:
        shown = rich.table.Table(box=None, pad_edge=False)
        for index, column in enumerate(self.columns):
            shown.add_column(Text(column), justify="left" if index < self.left else "right")
        for line in self.lines:
            shown.add_row(*map(Text, line))
        return shown


def pivot(corner: str, cells: Mapping[tuple[str, str], str | None]) -> Table:
    """Texts by the names of their line and column, each in the order in which they first come."""
    return Table.of(pd.Series(cells, dtype=object).unstack(sort=False).reset_index(names=corner))


def listed(items: Iterable[Any]) -> str:
    """As in ``1, 2 and 4``."""
    *words, last = [str(item) for item in items] or ["none"]
    return f"{', '.join(words)} and {last}" if words else last


def pairs(values: Mapping[str, object]) -> str:
    """As in ``emssd 0.1.0, torch 2.13.0``."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def escape(text: str) -> str:
    """`text` as Markdown that shows it as it is, in one line."""
    return re.sub(r"([\\`*\[\]<>&$])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """`text` as a span of code, in one line."""
    inner = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", inner)), default=0))
    pad = " " if inner.startswith("`") or inner.endswith("`") else ""
    return f"{fence}{pad}{inner}{pad}{fence}"
