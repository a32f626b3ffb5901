"""The options of a plugin as the command line holds them: OmegaConf's structured config and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast

from omegaconf import MISSING, MissingMandatoryValue, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]  # it ships no types

from emssd.errors import ConfigError
from emssd.plugins.structured import structured

__all__ = ["from_text", "made", "round_trip"]


def from_text(arguments: Iterable[str]) -> dict[str, Any]:
    """``["length=3", "names=[a,b]"]`` as the values that they stand for in YAML. Raises ConfigError: a value that is no
    YAML.
    """
    values = OmegaConf.create()
    for argument in arguments:
        try:
            values.merge_with_dotlist([argument])
        except YAMLError as error:
            reason = getattr(error, "problem", None) or error
            raise ConfigError(
                f"the value of {argument!r} is no YAML: {reason}; write it as in length=3 or names=[a,b]"
            ) from error
    return cast("dict[str, Any]", OmegaConf.to_container(values))


def made(config: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `config` with `values`, converted to the types of its fields. Raises ConfigError: a
    field that has no default is not among `values`; or OmegaConfBaseException: an unknown field, or a value of another
    type.
    """
    if not (values or _required(config)):
        return config()  # also one that OmegaConf cannot hold, which breaks a rule of its own
    try:
        return OmegaConf.to_object(OmegaConf.merge(structured(config), dict(values)))
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(
            f"{config.__name__}.{key} has no default and is not given; give it, as in {key}=VALUE"
        ) from error


def _required(config: type) -> list[str]:
    if not dataclasses.is_dataclass(config):
        return []
    return [
        field.name
        for field in dataclasses.fields(config)
        if field.default == MISSING or field.default is field.default_factory is dataclasses.MISSING
    ]


def round_trip(config: Any) -> Any:
    """`config` once through YAML, composed over the defaults of its class as Hydra does it."""
    written = OmegaConf.to_yaml(OmegaConf.structured(config))
    return OmegaConf.to_object(OmegaConf.merge(structured(type(config)), OmegaConf.create(written)))
