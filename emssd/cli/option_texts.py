"""Descriptions of choices, and type, default and description of each option of a dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from omegaconf import MISSING

__all__ = ["OptionText", "choice_text", "introduction", "option_texts", "preset_text", "written"]

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


class OptionText(NamedTuple):
    """One option; its default is `omegaconf.MISSING` if there is none, and its text may be empty."""

    name: str
    kind: Any
    default: Any
    text: str

    @property
    def is_needed(self) -> bool:
        """Whether there is no default."""
        return bool(self.default == MISSING)


def choice_text(choice: str, config: type) -> str:
    """The text after `choice`, as in "`drafter=llma`: …", in the docstring of a plugin's config or its module."""
    for documented in (config, sys.modules.get(config.__module__)):
        paragraph = " ".join(introduction(documented).partition("\n\n")[0].split())
        if f"`{choice}`: " in paragraph:
            return paragraph.partition(f"`{choice}`: ")[2]
    return ""


def preset_text(path: Path) -> str:
    """The comment that a preset's file begins with."""
    comment = re.match(r"(?:# @.*\n)?((?:# .*\n)*)", path.read_text(encoding="utf-8"))
    return " ".join(line.removeprefix("# ") for line in comment[1].splitlines()) if comment else ""


def option_texts(kind: type) -> list[OptionText]:
    """The options of a dataclass, in its order."""
    texts, hints, options = attributes(kind), get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        default = MISSING if default is dataclasses.MISSING else default
        options.append(OptionText(field.name, hints[field.name], default, texts.get(field.name, "")))
    return options


def written(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
