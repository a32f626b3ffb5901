"""From what Hydra composed to the options of a run; errors of Hydra and OmegaConf in one line."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from emssd.cli.config import DEFAULT_OUTPUT_DIR, STDOUT, DecodeConfig, RunConfig, no_size, prompt_source
from emssd.data.sources import DemoConfig, TextConfig
from emssd.errors import ConfigError, EmssdError, did_you_mean
from emssd.hooks.registry import KINDS, Registry

__all__ = ["explained", "to_objects", "to_options"]

_FULL = "HYDRA_FULL_ERROR"
_LONGEST = 200  # characters of what was given that an error repeats
_HELP = "python -m emssd --help lists all"
_GONE = {
    "cluster": "Ray Data spreads a job over workers; docs/how_to/ray.md shows how",
    "model.fallback": "A model that cannot be served is refused; model.generate of Transformers still decodes with it",
    "model.frozen": "A run loads its model itself, and needs no promise; leave it out",
    "model.checksums": "A run loads its model itself, and needs no check; leave it out",
    "data.seed": "Random prompts are the same each time",
    "drafter.seed": "drafter=replay draws the same each time",
    "budget.memory": "budget=adaptive looks back on 16 drafted tokens of a row",
    "budget.probe_interval": "budget=adaptive tries again after 32 steps at the soonest",
}
"""Options of earlier versions, and what stands in for them."""


def to_options(config: DictConfig, registry: Registry, *, is_sweep: bool = False) -> RunConfig:
    """The composed options of a run as dataclasses. Raises ConfigError: a value that cannot be, or options that cannot
    go together.
    """
    options = to_objects(config, registry)
    assert isinstance(options, RunConfig)
    _check_together(options, registry, is_sweep=is_sweep)
    if options.resume and DEFAULT_OUTPUT_DIR in OmegaConf.to_yaml(config):
        raise ConfigError("resume=true goes on with the job of a folder; say which, with output_dir=FOLDER")
    return options


def to_objects(config: DictConfig, registry: Registry) -> DecodeConfig:
    """The composed options of a run or a server as dataclasses. Raises ConfigError: a value that cannot be."""
    _check_names(config, registry)
    try:
        options = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise _as_config_error(error, registry) from error
    assert isinstance(options, DecodeConfig)
    for kind in filter(partial(hasattr, options), KINDS):
        name = getattr(chosen := getattr(options, kind), "name", None)
        if name not in registry.names(kind) or not isinstance(chosen, registry.find(kind, name).config):
            names = ", ".join(registry.names(kind))
            raise ConfigError(f"{kind}.name cannot be set by itself; choose with {kind}=NAME, one of {names}")
    return options


def _check_names(config: DictConfig, registry: Registry) -> None:
    """Refuse what ``+GROUP.OPTION=VALUE`` has put where nothing would read it."""
    for group, node in [("", config), *config.items_ex(resolve=False)]:
        owner = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if owner is not None and dataclasses.is_dataclass(owner):
            for option in {*node} - {field.name for field in dataclasses.fields(owner)}:
                raise ConfigError(_no_option(f"{group!s}.{option!s}".lstrip("."), owner, registry))


def _check_together(options: RunConfig, registry: Registry, *, is_sweep: bool) -> None:
    """Refuse `prompt` beside other prompts, a template for texts, to read stdin twice, and files beside stdout."""
    data = options.data
    if options.output_dir == STDOUT:
        wanted = {"resume=true": options.resume, "overwrite=true": options.overwrite, "a sweep": is_sweep}
        wanted[f"data={data.name}"] = prompt_source(options, registry).write_answers is not None
        for name in (name for name, is_wanted in wanted.items() if is_wanted):
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
        again = "resume=true reads the prompts of a job again"
        why = "a sweep reads its prompts once for each run" if is_sweep else again
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
    """The error of ours for an `error` that Hydra or OmegaConf raised: in their words, with the name of the option."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__  # Hydra wraps some of OmegaConf's
    if isinstance(error, OverrideParseException):
        return ConfigError(_syntax_text(error))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError(_missing_text(error, registry))
    if not isinstance(cause, OmegaConfBaseException):
        is_clear = isinstance(error, (ValueError, HydraException)) and str(error)
        return ConfigError(
            _line(error) if is_clear else f"these options cannot be: {type(error).__name__}: {_line(error)}"
        )
    name, text, owner = cause.full_key or "", _line(cause), cause.object_type
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and dataclasses.is_dataclass(owner):
        return ConfigError(_no_option(name, owner, registry))
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(f"{name} is not given and has no default; add {name}=VALUE")
    if missing := re.search(r"`experiment\.sizes\.(\w+)` is not a container", text):
        return ConfigError(no_size(missing[1]))
    return ConfigError(f"{name}: {text.rstrip('.')}; {_HELP}" if name else text)


def _no_option(name: str, owner: type, registry: Registry) -> str:
    """The message for an option called `name` in full, which the dataclass `owner` does not have."""
    if name in _GONE:
        return f"there is no option {name!r} any more. {_GONE[name]}"
    group, _, option = name.rpartition(".")
    names = [field.name for field in dataclasses.fields(owner) if field.name != "name"]
    guess = did_you_mean(option, names) or "."
    if not group:
        return f"there is no option {name!r}{guess} {_HELP}"
    chosen = f"{group} {owner.name!r}" if group in KINDS and hasattr(owner, "name") else group
    specs = registry.specs(group) if group in KINDS else []
    others = [spec.name for spec in specs if option in {field.name for field in dataclasses.fields(spec.config)}]
    belongs = f", which belongs to {group}={', '.join(others)}" if others else ""
    return f"{chosen} has no option {option!r}{belongs}{guess} It has {', '.join(names) or 'none'}"


def _syntax_text(error: OverrideParseException) -> str:
    text = str(error.override)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    if "=" in text:
        return f"{text!r} is not in Hydra's syntax ({_line(error.__cause__ or error)}); put the value in quotes"
    data = "jsonl" if text.endswith(".jsonl") else "text"
    return (
        f"{text!r} is no option, as in NAME=VALUE; to decode this text write prompt={shlex.quote(text)}, "
        f"to decode the prompts of this file data={data} data.path={shlex.quote(text)}. {_HELP}"
    )


def _missing_text(error: MissingConfigException, registry: Registry) -> str:
    file = str(error.missing_cfg_file)
    group, _, name = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
    choices = list(error.options or ())
    if group in KINDS:
        registry.find(group, name, choices)  # raises if it is no plugin, or one that failed or cannot run here
    guess = did_you_mean(name, choices) or ";"
    path = f". For a folder or an id of the Hugging Face hub write model.path={name}" if group == "model" else ""
    return f"unknown {group} {name!r}{guess} choose one of {', '.join(choices)}{path}"


def _line(error: BaseException) -> str:
    """The lines of an error as one, without what OmegaConf says of its types."""
    return " ".join(str(error).partition("\n    full_key: ")[0].split())
