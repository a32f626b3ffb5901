"""The options of a plugin as the command line holds them: OmegaConf's structured config and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from omegaconf import OmegaConf

from emssd.config import structured

__all__ = ["from_text", "made", "round_trip"]


def from_text(arguments: Iterable[str]) -> dict[str, Any]:
    """``["length=3", "names=[a,b]"]`` as the values that they stand for in YAML."""
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    return cast("dict[str, Any]", values)


def made(config: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `config` with `values`, converted to the types of its fields.

    Raises:
        OmegaConfBaseException: an unknown field, a value of another type, or a field without a value.
    """
    if not values:
        return config()
    return OmegaConf.to_object(OmegaConf.merge(structured(config), values))


def round_trip(config: Any) -> Any:
    """`config` once through YAML, composed over the defaults of its class as Hydra does it."""
    written = OmegaConf.to_yaml(OmegaConf.structured(config))
    return OmegaConf.to_object(OmegaConf.merge(structured(type(config)), OmegaConf.create(written)))
