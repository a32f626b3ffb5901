"""`TreeKind`: what drafts of drafters with trained heads look like, as their options say."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from emssd.errors import ConfigError, did_you_mean

__all__ = ["TreeKind", "chosen"]

Chosen = TypeVar("Chosen", bound=Enum)


class TreeKind(str, Enum):
    """What a row's draft looks like."""

    chain = "chain"
    static = "static"
    dynamic = "dynamic"


def chosen(kinds: type[Chosen], option: str, value: object) -> Chosen:
    """The one of `kinds` that has this value.

    Raises:
        ConfigError: none has.
    """
    try:
        return kinds(value)
    except ValueError:
        names = [str(kind.value) for kind in kinds]
        raise ConfigError(
            f"drafter.{option} is {value!r}{did_you_mean(str(value), names) or ';'} choose one of {', '.join(names)}"
        ) from None
