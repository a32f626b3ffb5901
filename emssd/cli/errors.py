"""Errors of Hydra and OmegaConf in one line, each with its fix."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import env_override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from emssd.cli.config import no_size
from emssd.errors import ConfigError, EmssdError, did_you_mean
from emssd.plugins.registry import KINDS, Registry

__all__ = ["as_config_error", "explained", "no_option"]

_FULL = "HYDRA_FULL_ERROR"
_LONGEST = 200  # characters of what was given that an error repeats
_HELP = "python -m emssd --help lists all"


@contextmanager
def explained(registry: Registry) -> Iterator[None]:
    """Convert exceptions of Hydra to errors of emssd; with ``HYDRA_FULL_ERROR=1`` they pass unchanged."""
    wants_traceback = os.environ.get(_FULL) == "1"
    try:
        with env_override({_FULL: "1"}):  # or Hydra prints its errors and exits
            yield
    except (EmssdError, BrokenPipeError):
        raise
    except Exception as error:
        if wants_traceback:
            raise
        raise as_config_error(error, registry) from error


def as_config_error(error: Exception, registry: Registry) -> ConfigError:
    """The error of ours for an `error` that Hydra or OmegaConf raised."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__  # Hydra wraps some of OmegaConf's
    if not isinstance(cause, OmegaConfBaseException):
        cause = error
    if isinstance(cause, OverrideParseException):
        return ConfigError(_line(_of_syntax(cause)))
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
        return ConfigError(_of_missing_config(cause, registry))
    if isinstance(cause, OmegaConfBaseException):
        return ConfigError(_line(_of_value(cause, registry)))
    if isinstance(error, (ValueError, HydraException)) and str(error):
        return ConfigError(_line(str(error)))
    said = " ".join(str(error).split())
    return ConfigError(
        f"these options cannot be ({type(error).__name__}: {said}); {_FULL}=1 in the environment says why"
    )


def no_option(name: str, owner: type, registry: Registry) -> str:
    """The message for an option called `name` in full, which the dataclass `owner` does not have."""
    group, _, option = name.rpartition(".")
    known = [field.name for field in dataclasses.fields(owner) if field.name != "name"]
    guess = did_you_mean(option, known) or "."
    if not group:
        return f"there is no option {name!r}{guess} {_HELP}"
    whose = f"{group} {owner.name!r}" if group in KINDS and hasattr(owner, "name") else group
    specs = registry.specs(group) if group in KINDS else []
    others = [spec.name for spec in specs if option in {field.name for field in dataclasses.fields(spec.config)}]
    belongs = f", which belongs to {group}={', '.join(others)}" if others else ""
    return f"{whose} has no option {option!r}{belongs}{guess} It has {', '.join(known) or 'none'}"


def _of_syntax(error: OverrideParseException) -> str:
    given, (name, is_assignment, value) = str(error.override), str(error.override).partition("=")
    if is_assignment:
        quoted = shlex.quote(f"{name}={QuotedString(value, Quote.double).with_quotes()}")
        why = f"{_cut(repr(given))} is not in Hydra's syntax ({_line(str(error.__cause__ or error))})"
        return f"{why}; a text with signs of its own wants quotes: {_cut(quoted)}"
    data, word = "jsonl" if given.endswith(".jsonl") else "text", _cut(shlex.quote(given))
    return (
        f"{_cut(repr(given))} is no option, as in NAME=VALUE; to decode this text write prompt={word}, "
        f"to decode the prompts of this file data={data} data.path={word}. {_HELP}"
    )


def _of_missing_config(error: MissingConfigException, registry: Registry) -> str:
    file = str(error.missing_cfg_file)
    group, _, name = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
    there = list(error.options or ())
    if group in KINDS:
        registry.find(group, name, there)  # raises if it is no plugin, or one that failed or cannot run here
    guess = did_you_mean(name, there) or ";"
    path = f". For a folder or an id of the Hugging Face hub write model.path={name}" if group == "model" else ""
    return f"unknown {group} {name!r}{guess} choose one of {', '.join(there)}{path}"


def _of_value(error: OmegaConfBaseException, registry: Registry) -> str:
    name, said, owner = error.full_key or "", str(error), error.object_type
    if isinstance(error, MissingMandatoryValue):
        return f"{name} is not given and has no default; add {name}=VALUE"
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and dataclasses.is_dataclass(owner):
        return no_option(name, owner, registry)
    if missing := re.search(r"`experiment\.sizes\.(\w+)` is not a container", said):
        return no_size(missing[1])
    if isinstance(error, InterpolationResolutionError):
        hint = "where a text has ${ as it stands, write \\${"
    elif "ListConfig" in said:
        hint = f"a list is written {name}=[a,b]"
    else:
        hint = "python -m emssd --help says what it is"
    return f"{name}: {_line(said).rstrip('.')}; {hint}" if name else said


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _line(text: str) -> str:
    """All lines as one, without Hydra's links and marks, and without what OmegaConf says of its types."""
    lines = [line.strip(" \t^") for line in text.partition("\n    full_key: ")[0].splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("See https://"))
