"""The type of an option says what it can be, as in ``depth: AtLeastOne = 5``, and `check_options` holds it to that."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

from emssd.errors import ConfigError, did_you_mean

__all__ = ["AtLeastOne", "AtLeastZero", "Meta", "Positive", "Share", "check_options"]

AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

_hints = cache(partial(get_type_hints, include_extras=True))
_LIMIT = 2**63  # a tensor holds integers below it
_SIGNS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_TYPES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list"}


def check_options(options: Any, group: str = "", spelled: Callable[[str], str] = str) -> None:
    """Make sure that each option of a dataclass, and of dataclasses in it, has a value of its type, and that tensors
    hold every number. The text of an enumeration's member becomes that member, a path its text.

    Args:
        group: in front of the options' names, as in ``drafter.depth``.
        spelled: a name as the user writes it.

    Raises:
        ConfigError: a value cannot be. The message names the option, its value and what is possible.
    """
    kind: Any = type(options)
    for field in fields(options):
        name, value = spelled(f"{group}.{field.name}".lstrip(".")), getattr(options, field.name)
        _check_numbers(name, value)
        if not is_dataclass(value):
            object.__setattr__(options, field.name, _converted(name, value, _hints(kind)[field.name]))


def _check_numbers(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be a finite number")
    if isinstance(value, int) and abs(value) >= _LIMIT:
        raise ConfigError(f"{name} is a number of {len(str(abs(value)))} digits; it must be below 2^63")
    if is_dataclass(value):
        check_options(value, name)
    for key, item in value.items() if isinstance(value, dict) else ():
        _check_numbers(f"{name}.{key}", item)
    for index, item in enumerate(value if isinstance(value, list) else ()):
        _check_numbers(f"{name}[{index}]", item)


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return convert(os.fspath(value) if isinstance(value, os.PathLike) else value, kind)
    except ValidationError as error:
        words, _, where = str(error).partition(" - at ")
    for part in (kind, *get_args(kind)):
        if names := _members(part):
            guess = did_you_mean(str(value), names) or ";"
            raise ConfigError(f"{name} is {value!r:.200}{guess} choose one of {', '.join(names)}")
    wanted, sign, bound = re.findall(r"`(.+?)`(?: ([<>=]+) (\S+))?", words)[0]
    types = " or ".join(_TYPES.get(part, part) for part in wanted.split(" | "))
    possible = f"{_SIGNS[sign]} {bound.removesuffix('.0')}" if sign else types
    raise ConfigError(f"{name} is {value!r:.200}; {'each item' if where else 'it'} must be {possible}")


def _members(kind: Any) -> list[str]:
    """The values of an enumeration or a `Literal`."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    return [str(member.value) for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
