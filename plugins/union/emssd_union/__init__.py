"""Plugin `drafter=union`: several drafters draft for every row, and their drafts are merged into one token tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.hooks import DrafterSpec, offering

__all__ = ["UnionConfig"]


@dataclass
class UnionConfig:
    """Options of `drafter=union`.

    Attributes:
        drafters: names of drafters; all of them draft for every row. Where their trees together are larger than the
            budget, each keeps about equally many tokens; those that several agree on count once.
        options: by name the options of a drafter, as in ``drafter.options.suffix.branches=4``.
    """

    drafters: list[str] = field(default_factory=lambda: ["suffix", "llma"])
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


def _build(config: UnionConfig, context: DrafterContext) -> Drafter:
    """The drafters of `config` as one."""
    from emssd.drafting import CheckedDrafter
    from emssd_union.drafter import UnionDrafter

    names = list(config.drafters)
    if not names or len(set(names)) < len(names) or "union" in names:
        raise ConfigError(
            f"drafter.drafters is {names}; give each drafter once, and not union itself, as in "
            f"drafter.drafters='[suffix,llma]'"
        )
    if foreign := [name for name in config.options if name not in names]:
        raise ConfigError(f"drafter.options.{foreign[0]} is set, but drafter.drafters is {names}")
    drafters = []
    for name in names:
        made = context.make_drafter(name, config.options.get(name, {}))
        if not isinstance(made, Drafter):
            raise ConfigError(
                f"drafter.drafters is {names}, and {name!r} is several drafters, which are asked in turn; name these"
            )
        on_error = context.on_drafter_error
        drafters.append(CheckedDrafter(made, f"{name!r} of union", context.vocab_size, on_error=on_error))
    return UnionDrafter(drafters)


emssd_drafters = offering(DrafterSpec("union", UnionConfig, _build))
