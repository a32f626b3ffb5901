"""Plugin `drafter=cascade`: several drafters in turn, each for the rows that those before it had nothing for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.hooks import DrafterSpec, offering

__all__ = ["CascadeConfig"]


@dataclass
class CascadeConfig:
    """Options of `drafter=cascade`.

    Attributes:
        drafters: names of drafters, the first to be asked first.
        options: by name the options of a drafter, as in ``drafter.options.llma.copy_length=10``.
    """

    drafters: list[str] = field(default_factory=lambda: ["suffix", "self"])
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


def _build(config: CascadeConfig, context: DrafterContext) -> list[Drafter]:
    """The drafters of `config`; the engine asks them in turn."""
    names = list(config.drafters)
    if not names or len(set(names)) < len(names) or "cascade" in names:
        raise ConfigError(
            f"drafter.drafters is {names}; give each drafter once, and not cascade itself, as in "
            f"drafter.drafters='[suffix,self]'"
        )
    if foreign := [name for name in config.options if name not in names]:
        raise ConfigError(f"drafter.options.{foreign[0]} is set, but drafter.drafters is {names}")
    return [context.make_drafter(name, config.options.get(name, {})) for name in names]


emssd_drafters = offering(DrafterSpec("cascade", CascadeConfig, _build))
