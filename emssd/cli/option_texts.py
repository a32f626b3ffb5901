"""What is said of each option of a dataclass: its type, its default, and its description."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, NamedTuple, get_type_hints

from omegaconf import MISSING

from emssd.cli.docstrings import attributes

__all__ = ["OptionText", "option_texts", "written"]


class OptionText(NamedTuple):
    """One option.

    Attributes:
        name: of the field.
        kind: its type.
        default: its value where none is given; `omegaconf.MISSING` if there is none.
        text: what the class's docstring says of it; empty if it says nothing.
    """

    name: str
    kind: Any
    default: Any
    text: str


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
