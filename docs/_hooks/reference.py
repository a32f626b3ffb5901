"""Writes the pages of docs/reference that are made from docstrings: python docs/_hooks/reference.py."""

from __future__ import annotations

from pathlib import Path

import options
import types_page

__all__ = ["MADE"]

MADE = {"options.md": options.page, "types.md": types_page.page}
"""By file of docs/reference the function that gives its Markdown."""

if __name__ == "__main__":
    for name, page in MADE.items():
        (Path(__file__).resolve().parents[1] / "reference" / name).write_text(page(), encoding="utf-8")
