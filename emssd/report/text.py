"""Markdown of what a report says: tables, and text that comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq

__all__ = ["code", "escape", "listed", "table"]


def escape(text: str) -> str:
    """`text` as Markdown that shows it as it is, in one line."""
    return re.sub(r"([\\`*\[\]<>&$])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """`text` as a span of code, in one line."""
    inner = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", inner)), default=0))
    pad = " " if inner.startswith("`") or inner.endswith("`") else ""
    return f"{fence}{pad}{inner}{pad}{fence}"


def table(columns: Seq[str], lines: Iterable[Seq[str]], *, left: int = 1) -> str:
    """A table of Markdown; all but the first `left` columns are aligned to the right."""
    rules = [":--"] * left + ["--:"] * (len(columns) - left)
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in [columns, rules, *lines]
    )


def listed(items: Iterable[object]) -> str:
    """As in ``1, 2 and 4``."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"
