"""A table as text, shown alike on the console and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import rich.table
from rich.text import Text

__all__ = ["Code", "Table", "code", "escape", "grouped", "listed", "pairs", "pivot"]

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


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
    def of(cls, lines: Iterable[Mapping[str, str | None]], left: int = 1) -> Table:
        """Each line gives its texts by their columns. A column that is ``None`` in all of them is left out."""
        lines = list(lines)
        columns = dict.fromkeys(chain.from_iterable(lines))
        kept = [name for name in columns if any(line.get(name) is not None for line in lines)]
        return cls(kept, [[line.get(name) or "" for name in kept] for line in lines], left)

    def markdown(self) -> str:
        """As Markdown that shows each cell as it is."""
        rules = [":--"] * self.left + ["--:"] * (len(self.columns) - self.left)
        shown = [
            [(code if isinstance(cell, Code) else escape)(cell).replace("|", "\\|") for cell in cells]
            for cells in (self.columns, *self.lines)
        ]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in [shown[0], rules, *shown[1:]])

    def console(self) -> rich.table.Table:
        """For a rich console."""
        shown = rich.table.Table(box=None, pad_edge=False)
        for index, column in enumerate(self.columns):
            shown.add_column(Text(column), justify="left" if index < self.left else "right")
        for line in self.lines:
            shown.add_row(*map(Text, line))
        return shown


def pivot(corner: str, cells: Mapping[tuple[str, str], str | None]) -> Table:
    """Texts by the names of their line and column, each in the order in which they first come."""
    names, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    lines = [[name, *(cells.get((name, column)) or "" for column in columns)] for name in names]
    return Table([corner, *columns], lines)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Items by their key, in their order."""
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def listed(items: Iterable[object]) -> str:
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
