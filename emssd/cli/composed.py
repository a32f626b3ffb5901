"""From what Hydra composed to the options of a run: every value is of the type that its dataclass says, and can be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from emssd.cli.option_names import check_composed
from emssd.cli.option_texts import default_of, parts_of
from emssd.cli.usage import as_config_error, wrong_value
from emssd.data.prompts import SourceConfig
from emssd.data.sources import DemoConfig
from emssd.errors import ConfigError
from emssd.jobs.config import DEFAULT_OUTPUT_DIR, RunConfig
from emssd.plugins.registry import KINDS, Registry

__all__ = ["to_options"]

_LARGEST = 2**63 - 1  # that a tensor can hold


def to_options(config: DictConfig, overrides: Seq[str], registry: Registry, *, is_sweep: bool = False) -> RunConfig:
    """The composed options as dataclasses.

    Args:
        config: as Hydra composed it.
        overrides: of the command line and the sweep, as Hydra has them.
        registry: the plugins.
        is_sweep: other runs follow, or came before.

    Raises:
        ConfigError: a value that cannot be, or options that cannot go together.
    """
    check_composed(config)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        _check_flag(config, override)
    try:
        options = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise as_config_error(error) from error
    assert isinstance(options, RunConfig)
    _check_values("", options)
    for kind in KINDS:
        _check_choice(kind, getattr(options, kind), registry)
    _check_prompt(options)
    _check_stdin(options, is_sweep=is_sweep)
    if options.resume and DEFAULT_OUTPUT_DIR in OmegaConf.to_yaml(config):
        raise ConfigError("resume=true goes on with the job of a folder; say which, with output_dir=FOLDER")
    return options


def _check_flag(config: DictConfig, override: Override) -> None:
    """OmegaConf takes any number for true or false; here only what says so."""
    parent, _, name = str(override.key_or_group).rpartition(".")
    node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
    if not isinstance(node, DictConfig) or not isinstance(node._get_node(name, validate_access=False), BooleanNode):
        return
    value = override.value()
    if isinstance(value, (int, float)) and value not in (0, 1):
        raise ConfigError(wrong_value(f"{override.key_or_group}", value, bool))


def _check_values(name: str, value: Any, kind: Any = Any) -> None:
    """Every value has the type of its field, and every number is one.

    Raises:
        ConfigError: with the name of the option.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be a finite number")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(f"{name} is a number of {len(str(abs(value)))} digits; it must be below 2^63")
    if not any(_fits(value, part) for part in parts_of(kind)):
        raise ConfigError(wrong_value(name, value, kind))
    if dataclasses.is_dataclass(value):
        hints = get_type_hints(type(value))
        for field in dataclasses.fields(value):
            _check_values(f"{name}.{field.name}".lstrip("."), getattr(value, field.name), hints[field.name])
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_values(f"{name}.{key}", item, _element(kind))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            _check_values(f"{name}[{place}]", item, _element(kind))


def _fits(value: Any, kind: Any) -> bool:
    kind = get_origin(kind) or kind
    if kind is Any or not isinstance(kind, type):
        return True
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is str and isinstance(value, Enum))


def _element(kind: Any) -> Any:
    """The type of the elements of a list, or of the values of a dictionary."""
    inside = [get_args(part)[-1] for part in parts_of(kind) if part is not NoneType and get_args(part)]
    return inside[0] if inside else Any


def _check_choice(kind: str, chosen: Any, registry: Registry) -> None:
    """The name of a choice is that of its plugin.

    Raises:
        ConfigError: it was changed, or the choice is no plugin's options.
    """
    name = getattr(chosen, "name", None)
    if name not in registry.names(kind) or not isinstance(chosen, registry.find(kind, name).config):
        known = ", ".join(registry.names(kind))
        raise ConfigError(f"{kind}.name cannot be set by itself; choose with {kind}=NAME, one of {known}")


def _check_prompt(options: RunConfig) -> None:
    """`prompt` is decoded in the place of data, so that no other can be asked for."""
    if options.prompt is None:
        return
    if options.experiment is not None:
        raise ConfigError("an experiment decodes the data of its task; leave prompt= or experiment= out")
    own = {field.name for field in dataclasses.fields(SourceConfig)} - {"limit"}
    others = [field for field in dataclasses.fields(options.data) if field.name not in own]
    changed = [field.name for field in others if getattr(options.data, field.name) != default_of(field)]
    if changed or not isinstance(options.data, DemoConfig):
        what = f"data.{changed[0]}" if changed and isinstance(options.data, DemoConfig) else "data"
        raise ConfigError(f"prompt= is decoded in the place of data; leave {what}= out, or prompt=")


def _check_stdin(options: RunConfig, *, is_sweep: bool) -> None:
    """What comes by stdin can be read once."""
    if getattr(options.data, "path", None) != "-":
        return
    why = "a sweep reads its prompts once for each run" if is_sweep else "resume=true reads the prompts of a job again"
    if is_sweep or options.resume:
        raise ConfigError(f"{why}, and data.path=- is there only once; save them to a file, and give data.path=FILE")
