"""`Grammar`: the form that an output must have, as users give it. `emssd.sampling.matching` holds outputs to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emssd.errors import ConfigError

__all__ = ["Grammar"]

_FORMS = "json, a JSON schema, a file SCHEMA.json or GRAMMAR.lark, regex:EXPRESSION, or lark:GRAMMAR"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an output: `text` is a JSON schema, a regular expression, or a Lark grammar, as `kind` says."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"grammar holds {self.text[error.start]!a}, which is half of a surrogate pair; repair what wrote it"
            ) from error

    @classmethod
    def of(cls, value: Any) -> Grammar:
        """The grammar that a user means with `value`.

        A mapping is a JSON schema; so is a text that begins with a brace. ``json`` is any JSON object. A text that ends
        with ``.json`` or ``.lark`` is a file; other texts begin with ``regex:`` or ``lark:``.
        """
        if isinstance(value, Grammar):
            return value
        text = value if isinstance(value, str) else ""
        kind, colon, rest = text.partition(":")
        if text.strip() == "json":
            return cls("json_schema", '{"type": "object"}')
        if colon and kind in ("regex", "lark") and rest:
            return cls(kind, rest)
        if isinstance(value, Mapping) or text.lstrip().startswith("{"):
            return cls("json_schema", _schema(value, "it"))
        if text.endswith((".json", ".lark")):
            content = _content(text)
            return cls("lark", content) if text.endswith(".lark") else cls("json_schema", _schema(content, text))
        raise ConfigError(f"grammar is {value!r:.200}; give {_FORMS}")


def _schema(value: Mapping[str, Any] | str, name: str) -> str:
    """JSON of `value` if it is an object; errors call it `name`."""
    try:
        schema = json.loads(value) if isinstance(value, str) else dict(value)
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"grammar is to be a JSON schema, and {name} is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"grammar is to be a JSON schema, and {name} is a {type(schema).__name__}; give an object")
    return text


def _content(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"grammar is the file {name}, which cannot be read: {error}; give {_FORMS}") from error
