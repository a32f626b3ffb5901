"""Reads docstrings: what stands before their sections, and the entries of a section."""

from __future__ import annotations

import inspect
import re

__all__ = ["attributes", "entries", "introduction", "markdown", "sections"]

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n {8}.*)*)", re.MULTILINE)


def introduction(documented: object) -> str:
    """The text before the first section, as Markdown."""
    return markdown(_SECTION.split(_text(documented))[0].strip())


def sections(documented: object) -> dict[str, str]:
    """By title the text of each section, indented as in the docstring."""
    parts = _SECTION.split(_text(documented))
    return {title: body.strip("\n") for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def entries(section: str) -> dict[str, str]:
    """By name what a section says of it, as Markdown; ``a, b: text`` says it of both."""
    texts: dict[str, str] = {}
    for entry in _ENTRY.finditer(section):
        texts |= dict.fromkeys(entry["names"].split(", "), markdown(" ".join(entry["text"].split())))
    return texts


def attributes(kind: type) -> dict[str, str]:
    """By name the text of each attribute that the class or one of its bases documents."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        texts |= entries(sections(base).get("Attributes", ""))
    return texts


def markdown(text: str) -> str:
    """Code is in double backticks in docstrings, and in single ones in Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


def _text(documented: object) -> str:
    return inspect.cleandoc(getattr(documented, "__doc__", None) or "")
