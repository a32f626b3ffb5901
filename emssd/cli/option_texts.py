"""What is said of each option of a dataclass: its type, its default, and its description."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_type_hints

from omegaconf import MISSING

from emssd.cli.docstrings import attributes

__all__ = ["OptionText", "default_of", "option_texts", "written"]


@dataclass(frozen=True, slots=True)
class OptionText:
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
    texts, hints = attributes(kind), get_type_hints(kind)
    return [
        OptionText(field.name, hints[field.name], default_of(field), texts.get(field.name, ""))
        for field in dataclasses.fields(kind)
    ]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; `omegaconf.MISSING` where there is none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


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
