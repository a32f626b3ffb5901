"""JSON values as typed records: dataclasses and structs of msgspec."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

__all__ = ["object_in", "read_json", "typed"]

_Kind = TypeVar("_Kind")
_SHOWN = 40  # characters of a wrong value


def typed(value: Any, kind: type[_Kind]) -> _Kind:
    """`value`, as `read_json` gives it, as a `kind`. Fields that `kind` does not have are left out. Raises ValueError:
    it is something else. The message says what: ``it has no id``, or ``its id cannot be 5``.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True)  # JSON has no other keys
    except msgspec.ValidationError as error:
        if error.__cause__ is not None:  # the record has refused its values
            raise error.__cause__ from None
        message, _, path = str(error).partition(" - at `$")
        names = re.findall(r"\w+", path)
        if missing := re.match(r"Object missing required field `(\w+)`", message):
            raise ValueError(f"it has no {'.'.join([*names, missing[1]])}") from None
        if not names:
            raise ValueError("it is no JSON object") from None
        raise ValueError(f"its {names[0]} cannot be {json.dumps(value[names[0]], default=str)[:_SHOWN]}") from None


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError: it is not JSON (`json.JSONDecodeError`), or larger or deeper than
    Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # of integers with thousands of digits; the rest of it is for programmers
        raise ValueError(str(error).partition(";")[0]) from None


def object_in(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one in the place of anything else."""
    try:
        value = read_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
