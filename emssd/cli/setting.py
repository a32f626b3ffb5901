"""The words for a run: its plugins with their options, and every option that is not its default."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from emssd.cli.config import RunConfig

__all__ = ["AROUND", "changed", "changed_of_run", "label_of", "setting_of"]

AROUND = frozenset({"resume", "overwrite", "output_dir", "progress", "figures", "details"})
"""Options that say where a run goes and how it is shown."""
_APART = {"drafter", "backend", "model", "data", "sampling", "budget", "speculate", "batch_size", "check", "data.name"}


def label_of(options: Any) -> str:
    """A plugin's name, and its options where they are not the defaults: ``padded(pad_kv=False)``."""
    values = [f"{name}={value}" for name, value in changed(options).items() if name != "name"]
    return f"{options.name}({', '.join(values)})" if values else str(options.name)


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not the defaults; those without a default are among them."""
    values = {}
    for field in dataclasses.fields(options):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        value = getattr(options, field.name)
        if value != default:
            values[field.name] = value.value if isinstance(value, Enum) else value
    return values


def changed_of_run(config: RunConfig) -> dict[str, Any]:
    """The same of a run, its model, its data and its sampling, under full names such as ``model.path``."""
    groups = {"": config, "model.": config.model, "data.": config.data, "sampling.": config.sampling}
    return {f"{group}{name}": value for group, part in groups.items() for name, value in changed(part).items()}


def setting_of(config: RunConfig) -> dict[str, Any]:
    """By which runs of the command line are compared: drafter, budget and batch size, and all that must be equal."""
    equal = {name: value for name, value in changed_of_run(config).items() if name not in AROUND | _APART}
    equal |= {"backend": label_of(config.backend), "data": config.data.name}
    return {
        "drafter": label_of(config.drafter) if config.speculate else "none",
        "budget": label_of(config.budget),
        "batch_size": config.batch_size,
        "options": sorted(f"{name}={value}" for name, value in equal.items()),
    }
