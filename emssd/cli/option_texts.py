"""What can be said of each option of a dataclass: its type in the user's words, its default, and its description."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from emssd.cli.docstrings import attributes

__all__ = ["OptionText", "default_of", "option_texts", "parts_of", "type_in_words", "written"]

_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


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


def parts_of(kind: Any) -> Seq[Any]:
    """The types that a value may have: those of a union, else the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def type_in_words(kind: Any) -> str:
    """A type as it is told to a user: ``an integer, or null``."""
    parts = [_one_in_words(part) for part in parts_of(kind) if part is not NoneType]
    return " or ".join(parts) + (", or null" if NoneType in parts_of(kind) else "")


def _one_in_words(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{'one of ' * (len(kind) > 1)}{', '.join(str(each.value) for each in kind)}"
    if get_origin(kind) is list:
        return "a list, as in [a,b]"
    if get_origin(kind) is dict or kind is dict or dataclasses.is_dataclass(kind):
        return "a dictionary, as in {a: 1}"
    return _WORDS.get(kind, "a value")


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
