"""Writes the page of all options from the dataclasses that define them, and from the presets in conf/."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from emssd.cli import option_texts as docstrings
from emssd.cli.config import (
    DecodeConfig,
    ExperimentConfig,
    RunConfig,
    SamplingConfig,
    ServeConfig,
    TaskConfig,
    conf_dir,
)
from emssd.cli.option_texts import option_texts, preset_text, written
from emssd.data.model_options import ModelOptions
from emssd.decoding.options import EngineOptions
from emssd.hooks.hookspecs import Spec
from emssd.hooks.registry import Registry

__all__ = ["page", "specs"]

_HEAD = """# Options

Every option of `python -m emssd`, and of the plugins that come with it, with its default. They are set on the command
line, as in `batch_size=16 drafter=llma drafter.copy_length=10`. In the library those of
[the engine](#engine) and [the model](#model) are arguments of `Engine.from_pretrained`, and those of plugins are fields
of their dataclasses, as in `drafter=LLMAConfig(copy_length=10)`. A name that does not exist is an error. `null` is
Python's `None`. `python -m emssd --help` lists the options of what is chosen, those of plugins from elsewhere included.

This page is made from the dataclasses themselves.
"""
_GROUPS = {
    "drafter": "What guesses the next tokens. It can change the speed, never the output.",
    "backend": "What owns the KV cache and computes attention.",
    "budget": "How much each row may draft, step by step.",
    "data": "Where the prompts come from.",
}
_MORE = {
    "model": "The target model.",
    "sampling": "How the next token is chosen.",
    "method": "What an experiment compares.",
    "task": "What an experiment decodes.",
    "experiment": "A sweep whose runs are kept as rows.",
}


def page() -> str:
    """The Markdown of the page.

    Raises:
        LookupError: an option without a word about it in its class's docstring.
    """
    chosen = _main_choices()
    own = [field for field in dataclasses.fields(RunConfig) if field not in dataclasses.fields(EngineOptions)]
    lines = [_HEAD, "## Run", ""]
    for name, choice in chosen.items():
        what = (_GROUPS | _MORE)[name]
        lines.append(f"- `{name}` · [a choice](#{name}) · {choice}: {what}")
    lines += _options(RunConfig, [field for field in own if field.name not in chosen])
    lines += ["## Server", "", docstrings.introduction(ServeConfig), ""]
    lines += _options(ServeConfig, set(dataclasses.fields(ServeConfig)) - set(dataclasses.fields(DecodeConfig)))
    lines += ["## Engine", "", docstrings.introduction(EngineOptions), ""]
    lines += _options(EngineOptions, dataclasses.fields(EngineOptions))
    kinds = {
        "model": ModelOptions,
        "sampling": SamplingConfig,
        "experiment": ExperimentConfig,
        "task": TaskConfig,
    }
    for prefix, kind in kinds.items():
        lines += [f"## {prefix}=…", "", docstrings.introduction(kind), ""]
        lines += _options(kind, dataclasses.fields(kind), f"{prefix}.") + _presets(prefix)
    lines += ["## method=…", "", "What experiments compare; each sets options of the run.", ""]
    lines += _presets("method")
    for group, what in _GROUPS.items():
        lines += [f"## {group}=…", "", what, ""]
        for spec in specs(group):
            lines += [f"### {group}={spec.name}", "", docstrings.introduction(spec.config), ""]
            lines += _options(spec.config, dataclasses.fields(spec.config), f"{group}.")
        lines += _presets(group)
    return "\n".join(lines).rstrip("\n") + "\n"


def _main_choices() -> dict[str, str]:
    """By config group what the main config chooses."""
    defaults = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))["defaults"]  # type: ignore[call-overload,index]
    chosen = {name: str(value) for entry in defaults if isinstance(entry, dict) for name, value in entry.items()}
    own = {name: "null" if value == "None" else value for name, value in chosen.items() if " " not in name}
    return {name: f"default `{value}`" for name, value in own.items()}


def specs(group: str) -> list[Spec]:
    """The offers of this distribution; the page must not depend on what else is installed."""
    registry = Registry()
    return [spec for spec in registry.specs(group) if registry.source(group, spec.name).startswith("emssd ")]


def _options(kind: type, fields: Any, prefix: str = "") -> list[str]:
    """A list: name, type and default, then what the docstring says."""
    lines, wanted = [], {field.name for field in fields}
    for option in option_texts(kind):
        if option.name not in wanted:
            continue
        if not option.text:
            raise LookupError(f"{kind.__name__}.{option.name} is not in the Attributes of its docstring")
        default = "no default" if option.is_needed else f"default `{written(option.default)}`"
        lines.append(f"- `{prefix}{option.name}` · {_type(option.kind)} · {default}: {option.text}")
    return [*lines, ""]


def _type(hint: Any) -> str:
    """A type in the user's words."""
    parts = [part for part in get_args(hint) if part is not NoneType]
    if NoneType in get_args(hint):
        return f"{' or '.join(map(_type, parts))}, or `null`"
    if isinstance(hint, UnionType):
        return " or ".join(map(_type, parts))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " \\| ".join(f"`{each.value}`" for each in hint)
    words = {str: "text", int: "integer", float: "number", bool: "`true` \\| `false`"}
    if hint in words:
        return words[hint]
    return {list: f"list of {_type(parts[0])}", dict: "dictionary"}[hint.__origin__] if parts else "dictionary"


def _presets(group: str) -> list[str]:
    """A table of the files of conf/GROUP."""
    rows = list(_preset_rows(sorted((conf_dir() / group).glob("*.yaml"))))
    head = [
        f"### Presets of {group}",
        "",
        f"Files of `conf/{group}`.",
        "",
        "| preset | |",
        "|---|---|",
    ]
    return [*head, *rows, ""] if rows else []


def _preset_rows(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        said = preset_text(path)
        if not said:
            values = OmegaConf.load(path)
            assert isinstance(values, DictConfig)
            said = ", ".join(f"`{key!s}={value}`" for key, value in values.items() if key != "defaults")
        yield f"| `{path.parent.name}={path.stem}` | {said.replace('|', chr(92) + '|')} |"
