"""From what Hydra composed to the options of a run, with the checks that OmegaConf does not make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as Seq
from typing import Any, get_args, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from emssd.cli.config import DEFAULT_OUTPUT_DIR, STDOUT, RunConfig
from emssd.cli.errors import as_config_error, no_option
from emssd.data.openai_batch import OpenAIBatchConfig
from emssd.data.sources import DemoConfig
from emssd.errors import ConfigError
from emssd.plugins.registry import KINDS, Registry

__all__ = ["to_options"]

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
        raise as_config_error(error, registry) from error
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
                raise ConfigError(no_option(".".join(filter(None, (str(group), str(option)))), owner, registry))


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
    """Refuse `prompt` beside other prompts, to read stdin twice, and files where rows go to stdout."""
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
    if getattr(data, "path", None) == "-" and (is_sweep or options.resume):
        why = (
            "a sweep reads its prompts once for each run"
            if is_sweep
            else "resume=true reads the prompts of a job again"
        )
        raise ConfigError(f"{why}, and data.path=- is there only once; save them to a file, and give data.path=FILE")
