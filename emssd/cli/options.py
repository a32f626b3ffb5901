"""From what Hydra composed to the options of a run; errors of Hydra and OmegaConf in one line, each with its fix."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, get_args, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from emssd.cli.config import DEFAULT_OUTPUT_DIR, STDOUT, RunConfig, no_size
from emssd.data.openai_batch import OpenAIBatchConfig
from emssd.data.sources import DemoConfig, TextConfig
from emssd.errors import ConfigError, EmssdError, did_you_mean
from emssd.plugins.registry import KINDS, Registry

__all__ = ["explained", "to_options"]

_FULL = "HYDRA_FULL_ERROR"
_LONGEST = 200  # characters of what was given that an error repeats
_HELP = "python -m emssd --help lists all"
_GONE = {
    "cluster": "Ray Data spreads a job over workers; docs/how_to/ray.md shows how",
    "model.fallback": "A model that cannot be served is refused; model.generate of Transformers still decodes with it",
    "model.frozen": "A run loads its model itself, and needs no promise; leave it out",
    "model.checksums": "A run loads its model itself, and needs no check; leave it out",
}
"""Options of earlier versions, and what stands in for them."""

_LIMIT = 2**63  # a tensor holds integers below it


def to_options(config: DictConfig, overrides: Seq[str], registry: Registry, *, is_sweep: bool = False) -> RunConfig:
    """The composed options as dataclasses. Raises ConfigError: a value that cannot be, or options that cannot go
    together.
    """
    _check_names(config, registry)
    _check_flags(config, overrides)
    try:
        options = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise _as_config_error(error, registry) from error
    assert isinstance(options, RunConfig)
    _check_value("", options)
    for kind in KINDS:
        _check_choice(kind, getattr(options, kind), registry)
    _check_together(options, is_sweep=is_sweep)
    if options.resume and DEFAULT_OUTPUT_DIR in OmegaConf.to_yaml(config):
        raise ConfigError("resume=true goes on with the job of a folder; say which, with output_dir=FOLDER")
    return options


def _check_names(config: DictConfig, registry: Registry) -> None:
    """Refuse what ``+GROUP.OPTION=VALUE`` has put where nothing would read it."""
    for group, node in [("", config), *config.items_ex(resolve=False)]:
        owner = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if owner is None or not dataclasses.is_dataclass(owner):
            continue
        known = [field.name for field in dataclasses.fields(owner)]
        for option in node:
            if option not in known:
                raise ConfigError(_no_option(".".join(filter(None, (str(group), str(option)))), owner, registry))


def _check_flags(config: DictConfig, overrides: Seq[str]) -> None:
    """OmegaConf takes any integer for true or false; here only 0 and 1."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        name, value = override.key_or_group, override.value()
        set_to = OmegaConf.select(config, name, throw_on_resolution_failure=False)
        if isinstance(set_to, bool) and isinstance(value, int) and value not in (0, 1):
            raise ConfigError(f"{name} is {value}; it must be true or false")


def _check_value(name: str, value: Any, kind: Any = Any) -> None:
    """Every number can be computed with, and a list or dictionary of scalars holds nothing else."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be a finite number")
    if isinstance(value, int) and abs(value) >= _LIMIT:
        raise ConfigError(f"{name} is a number of {len(str(abs(value)))} digits; it must be below 2^63")
    if isinstance(value, (list, dict)) and kind in (str, int, float, bool):
        raise ConfigError(f"{name} is {value}; it must be one value of type {kind.__name__}")
    if dataclasses.is_dataclass(value):
        kinds = get_type_hints(type(value))
        for field in dataclasses.fields(value):
            _check_value(f"{name}.{field.name}".lstrip("."), getattr(value, field.name), kinds[field.name])
    element = (get_args(kind) or (Any,))[-1]
    for key, item in value.items() if isinstance(value, dict) else ():
        _check_value(f"{name}.{key}", item, element)
    for place, item in enumerate(value if isinstance(value, list) else ()):
        _check_value(f"{name}[{place}]", item, element)


def _check_choice(kind: str, chosen: Any, registry: Registry) -> None:
    """The name of a choice is that of its plugin."""
    name = getattr(chosen, "name", None)
    if name not in registry.names(kind) or not isinstance(chosen, registry.find(kind, name).config):
        known = ", ".join(registry.names(kind))
        raise ConfigError(f"{kind}.name cannot be set by itself; choose with {kind}=NAME, one of {known}")


def _check_together(options: RunConfig, *, is_sweep: bool) -> None:
    """Refuse `prompt` beside other prompts, a template for texts, to read stdin twice, and files beside stdout."""
    data = options.data
    if options.output_dir == STDOUT:
        others = {"resume=true": options.resume, "overwrite=true": options.overwrite, "a sweep": is_sweep}
        others["data=openai_batch"] = isinstance(data, OpenAIBatchConfig)
        for name, is_asked in others.items():
            if is_asked:
                raise ConfigError(
                    f"output_dir={STDOUT} writes the rows of one run to stdout, and no file, which {name} needs; set "
                    f"output_dir to a folder"
                )
    if options.prompt is not None:
        if options.experiment is not None:
            raise ConfigError("an experiment decodes the data of its task; leave prompt= or experiment= out")
        if not isinstance(data, DemoConfig) or (data.limit, data.kind) != (DemoConfig.limit, DemoConfig.kind):
            raise ConfigError("prompt= is decoded in the place of data; leave data= and data.limit= out, or prompt=")
    if options.chat_template is not None and isinstance(data, DemoConfig | TextConfig) and not data.chat:
        raise ConfigError("chat_template= makes prompts of conversations, and these are texts; add data.chat=true")
    if getattr(data, "path", None) == "-" and (is_sweep or options.resume):
        why = (
            "a sweep reads its prompts once for each run"
            if is_sweep
            else "resume=true reads the prompts of a job again"
        )
        raise ConfigError(f"{why}, and data.path=- is there only once; save them to a file, and give data.path=FILE")


@contextmanager
def explained(registry: Registry) -> Iterator[None]:
    """Convert exceptions of Hydra to errors of emssd; with ``HYDRA_FULL_ERROR=1`` they pass unchanged."""
    before, os.environ[_FULL] = os.environ.get(_FULL), "1"  # or Hydra prints its errors and exits
    try:
        yield
    except (EmssdError, BrokenPipeError):
        raise
    except Exception as error:
        if before == "1":
            raise
        raise _as_config_error(error, registry) from error
    finally:
        os.environ.pop(_FULL, None)  # a plugin may have taken it out
        if before is not None:
            os.environ[_FULL] = before


def _as_config_error(error: Exception, registry: Registry) -> ConfigError:
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


def _no_option(name: str, owner: type, registry: Registry) -> str:
    """The message for an option called `name` in full, which the dataclass `owner` does not have."""
    group, _, option = name.rpartition(".")
    known = [field.name for field in dataclasses.fields(owner) if field.name != "name"]
    guess = did_you_mean(option, known) or "."
    if name in _GONE:
        return f"there is no option {name!r} any more. {_GONE[name]}"
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
        return _no_option(name, owner, registry)
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
