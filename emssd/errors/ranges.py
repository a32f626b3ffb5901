"""The type of an option says what it can be, as in ``depth: AtLeastOne = 5``, and `check_options` holds it to that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from emssd.errors import ConfigError, did_you_mean

__all__ = ["AtLeastOne", "AtLeastZero", "Positive", "Share", "check_options", "range_of"]

AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

_LIMIT = 2**63  # a tensor holds integers below it
_WORDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def check_options(options: Any, group: str = "", spelled: Callable[[str], str] = str) -> None:
    """Make sure that each option of a dataclass, and of dataclasses in it, has a value that its type allows.

    Every number must be one that tensors hold, and a list or dictionary of scalars holds nothing else. The text of an
    enumeration's member becomes that member.

    Args:
        group: in front of the options' names, as in ``drafter.depth``.
        spelled: a name as the user writes it.

    Raises:
        ConfigError: a value cannot be. The message names the option, its value and what is possible.
    """
    hints = _hints(type(options))
    for field in fields(options):
        value, (kind, is_optional) = getattr(options, field.name), _parts(hints[field.name])
        _check(spelled(f"{group}.{field.name}".lstrip(".")), value, hints[field.name])
        if isinstance(kind, type) and issubclass(kind, Enum) and not (value is None and is_optional):
            object.__setattr__(options, field.name, kind(value))


def range_of(kind: Any) -> str:
    """The range of an option of this type in words, as in ``at least 1, or null``; empty if it may have any value."""
    kind, is_optional = _parts(kind)
    if get_origin(kind) is not Annotated:
        return ""
    meta = kind.__metadata__[0]
    if meta.ge is not None and meta.le is not None:
        words = f"from {meta.ge} to {meta.le}"
    else:
        limits = ((text, getattr(meta, bound)) for bound, text in _WORDS.items())
        words = " and ".join(text.format(limit) for text, limit in limits if limit is not None)
    return f"{words}, or null" if is_optional else words


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _parts(kind: Any) -> tuple[Any, bool]:
    """The type of an option that is not ``None``, and whether it may be ``None``; `Any` for several types."""
    if get_origin(kind) not in (Union, UnionType):
        return kind, False
    parts = [part for part in get_args(kind) if part is not NoneType]
    return parts[0] if len(parts) == 1 else Any, NoneType in get_args(kind)


def _check(name: str, value: Any, kind: Any) -> None:
    if problem := _problem(value, kind):
        shown = f"a number of {len(str(abs(value)))} digits" if _is_large(value) else f"{value!r:.200}"
        raise ConfigError(f"{name} is {shown}{problem}")
    if is_dataclass(value):
        check_options(value, name)
    element = (get_args(_parts(kind)[0]) or (Any,))[-1]
    for key, item in value.items() if isinstance(value, dict) else ():
        _check(f"{name}.{key}", item, element)
    for index, item in enumerate(value if isinstance(value, list) else ()):
        _check(f"{name}[{index}]", item, element)


def _problem(value: Any, kind: Any) -> str:
    """The end of the message on a value that cannot be; empty if it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return "; it must be a finite number"
    if _is_large(value):
        return "; it must be below 2^63"
    if isinstance(value, (list, dict)) and kind in (str, int, float, bool):
        return f"; it must be one value of type {kind.__name__}"
    range_, (kind, is_optional) = range_of(kind), _parts(kind)
    if value is None and is_optional:
        return ""
    if kind is bool and not isinstance(value, bool):
        return "; it must be true or false"
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [str(member.value) for member in kind]
        guess = did_you_mean(str(value), names) or ";"
        return "" if value in names or value in list(kind) else f"{guess} choose one of {', '.join(names)}"
    if not range_:
        return ""
    number = Integral if kind.__origin__ is int else Real
    if isinstance(value, bool) or not isinstance(value, number):
        return f"; it must be a {'whole ' if number is Integral else ''}number, {range_}"
    return "" if _is_within(value, kind.__metadata__[0]) else f"; it must be {range_}"


def _is_within(value: Any, meta: Meta) -> bool:
    return (
        (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
        and (meta.lt is None or value < meta.lt)
    )


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= _LIMIT
