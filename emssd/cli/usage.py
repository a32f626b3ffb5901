"""What Hydra and OmegaConf say of a command line that cannot be, in a sentence: what was asked, what is possible."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from emssd.cli.option_texts import parts_of, type_in_words, written
from emssd.errors import ConfigError, did_you_mean

__all__ = ["as_config_error", "no_option", "wrong_value"]

_LONGEST = 200  # characters of what was given that an error repeats


def as_config_error(error: Exception) -> ConfigError:
    """The error of the user's that `error`, which was raised while options were composed, stands for."""
    for kind, explain in _EXPLAIN.items():
        if isinstance(error, kind):
            return ConfigError(_line(explain(error)))
    said = _line(str(error))
    if isinstance(error, ValueError) and said:  # Hydra's own words for arguments that cannot be
        return ConfigError(said)
    where = "HYDRA_FULL_ERROR=1 in the environment shows where this comes from"
    return ConfigError(f"these options cannot be ({type(error).__name__}: {said}); {where}")


def wrong_value(name: str, value: object, kind: Any) -> str:
    """The message for an option whose `value` is not of the type `kind`."""
    plain = type_in_words(kind)
    example = f", as in {name}=[{value}]" if get_origin(kind) is list and isinstance(value, str) and value else ""
    return f"{name} is {_short(value)}; it must be {plain.partition(', as in')[0] if example else plain}{example}"


def no_option(group: str, choice: str, option: str, known: Iterable[str]) -> str:
    """The message for an `option` that the `choice` of a `group` does not have."""
    names = [name for name in known if name != "name"]
    owner = f"{group} {choice!r}" if choice and group != "model" else group
    guess = did_you_mean(option, names) or "."
    return f"{owner} has no option {option!r}{guess} It has {', '.join(names) or 'none'}"


def _of_syntax(error: OverrideParseException) -> str:
    given = str(error.override)
    name, is_assignment, value = given.partition("=")
    if not is_assignment:
        return _of_word(given)
    cause = f" ({_line(str(error.__cause__))})" if error.__cause__ is not None else ""
    quoted = _quoted(name, value)
    return f"{_short(given)} is not in Hydra's syntax{cause}; a text with signs of its own wants quotes: {quoted}"


def _quoted(name: str, value: str) -> str:
    """As a shell wants it, with the quotes that Hydra wants inside."""
    return _cut(shlex.quote(f"{name}={QuotedString(value, Quote.double).with_quotes()}"))


def _of_word(word: str) -> str:
    path = Path(word)
    if path.suffix in (".jsonl", ".txt"):
        data = "jsonl" if path.suffix == ".jsonl" else "text"
        return f"{word!r} is no option; to decode the prompts of this file write data={data} data.path={word}"
    how = f"to decode this text write prompt={_cut(shlex.quote(word))}, to decode the prompts of a file"
    return f"{_short(word)} is no option, as in NAME=VALUE; {how} data=text data.path=FILE; --help lists the options"


def _of_composition(error: ConfigCompositionException) -> str:
    if isinstance(error.__cause__, OmegaConfBaseException):
        return _of_value(error.__cause__)
    said = str(error)
    if said.startswith("Ambiguous value for argument"):
        name, _, value = said.partition("'")[2].partition("'\n")[0].partition("=")
        return (
            f"{name}={_cut(value)} has commas; {name}=[{_cut(value)}] is a list, "
            f"{_quoted(name, value)} one text, and with -m before all options it is a sweep over the values"
        )
    if said.startswith("Sweep parameters"):
        return f"{said.partition(chr(39))[2].rpartition(chr(39))[0]} is a sweep; write -m before all options"
    return said


def _of_missing_config(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    there = f"; choose one of {', '.join(error.options)}" if error.options else ""
    return f"there is no {group}={name}{there}" if group else str(error).partition("\n")[0]


def _of_value(error: OmegaConfBaseException) -> str:
    name, said = error.full_key or "", str(error).partition("\n    full_key: ")[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{name} is not given and has no default; add {name}=VALUE"
    owner, kind = error.object_type, _type_of(error)
    if (
        isinstance(error, (ConfigKeyError, ConfigAttributeError))
        and owner is not None
        and dataclasses.is_dataclass(owner)
    ):
        known = [field.name for field in dataclasses.fields(owner)]
        return _of_unknown(name, str(error.key), error.parent_node, known)
    if isinstance(error, InterpolationResolutionError) and not isinstance(error, InterpolationValidationError):
        return f"{name} refers to what cannot be found: {said}; where a text has ${{ as it stands, write \\${{"
    if kind is None or not isinstance(error, ValueError) or (said.startswith("While dereferencing") and not name):
        return f"{name}: {said}" if name else said
    if isinstance(error, InterpolationValidationError):
        return f"{wrong_value(name, error.value, kind)} ({said.partition(': ')[0].lower()})"
    return wrong_value(name, error.value, kind)


def _of_unknown(name: str, key: str, owner: DictConfig, known: list[str]) -> str:
    group = name.rpartition(".")[0]
    if not group:
        return f"there is no option {name!r}{did_you_mean(name, known) or '.'} python -m emssd --help lists all"
    chosen = owner._get_node("name", validate_access=False)  # of a plugin's options
    return no_option(group, "" if chosen is None else str(chosen), key, known)


def _type_of(error: OmegaConfBaseException) -> Any:
    """The type of the option that the error is of; ``None`` where that cannot be told."""
    owner, key = error.object_type, str(error.key)
    if dataclasses.is_dataclass(owner):
        return get_type_hints(owner).get(key)
    inside = [part for part in parts_of(error.ref_type) if part is not NoneType]
    return get_args(inside[0])[-1] if inside and get_args(inside[0]) else None


def _short(value: object) -> str:
    return _cut(repr(value) if isinstance(value, str) else written(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _line(text: str) -> str:
    """All lines as one, without Hydra's links."""
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("See https://")]
    return re.sub(r"(?<=[.?!:;]); ", " ", "; ".join(filter(None, lines))).rstrip("; ")


_EXPLAIN: dict[type[Exception], Any] = {
    OverrideParseException: _of_syntax,
    MissingConfigException: _of_missing_config,
    ConfigCompositionException: _of_composition,
    OmegaConfBaseException: _of_value,
}
