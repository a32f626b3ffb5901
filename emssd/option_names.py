"""Explains a misspelt option better than Hydra would, before anything is composed; and after, one that slipped in."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from emssd.config import ModelConfig, RunConfig
from emssd.errors import ConfigError, did_you_mean
from emssd.registry import KINDS, Registry

__all__ = ["check_composed", "check_given"]

_CHANGERS = ("experiment", "task", "method")  # choices that change other choices


def check_given(arguments: Seq[str], registry: Registry, conf: Path, own: Path | None = None) -> None:
    """Check ``OPTION=VALUE`` and ``GROUP.OPTION=VALUE`` of the command line, as far as its choices tell.

    Args:
        arguments: of the command line.
        registry: the plugins.
        conf: the config directory.
        own: another one, of the user's presets; which options these have is not looked up.

    Raises:
        ConfigError: there is no such option; says which there are.
    """
    pairs = [argument.partition("=")[::2] for argument in arguments if re.match(r"[a-z_]+(\.\w+)*=", argument)]
    given = dict(pairs)
    groups = [path.name for folder in (conf, own) if folder for path in folder.iterdir() if path.is_dir()]
    top = {field.name for field in dataclasses.fields(RunConfig)}
    for name, _ in pairs:
        group, dot, option = name.partition(".")
        if group not in top | {*groups, "hydra"}:
            guess = did_you_mean(group, top) or "."
            raise ConfigError(f"there is no option {name!r}{guess} python -m emssd --help lists all")
        known = _known(group, given, registry, conf, own) if dot and not set(_CHANGERS) & set(given) else None
        if known is not None and (first := option.partition(".")[0]) not in known:
            raise ConfigError(_no_option(group, given.get(group, _default(group, conf)), first, known))


def check_composed(config: DictConfig) -> None:
    """Refuse what ``+GROUP.OPTION=VALUE`` has put where nothing would read it.

    Raises:
        ConfigError: a key that the options class does not have.
    """
    for group, node in config.items_ex(resolve=False):
        kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if dataclasses.is_dataclass(kind):
            known = [field.name for field in dataclasses.fields(kind)]
            for option in node:
                if option not in known:
                    raise ConfigError(_no_option(str(group), str(node.get("name", "")), str(option), known))
    known = [field.name for field in dataclasses.fields(RunConfig)]
    for option in config:
        if option not in known:
            raise ConfigError(f"there is no option {option!r}{did_you_mean(str(option), known)}")


def _known(group: str, given: Mapping[str, str], registry: Registry, conf: Path, own: Path | None) -> list[str] | None:
    """Options of whatever is chosen from `group`; ``None`` where that cannot be told."""
    if group == "model":
        return [field.name for field in dataclasses.fields(ModelConfig)]
    if group not in KINDS:
        return None
    found: list[str] = []
    for choice in given.get(group, _default(group, conf)).split(","):
        preset = conf / group / f"{choice}.yaml"
        name = str(OmegaConf.load(preset).defaults[0]) if preset.is_file() else choice
        users = own is not None and not preset.is_file() and (own / group / f"{choice}.yaml").is_file()
        if users or name not in registry.names(group):
            return None
        found += [field.name for field in dataclasses.fields(registry.find(group, name).config)]
    return list(dict.fromkeys(found))


def _default(group: str, conf: Path) -> str:
    choices: dict[Any, Any] = {}
    for item in OmegaConf.load(conf / "config.yaml").defaults:
        choices |= dict(item) if isinstance(item, DictConfig) else {}
    return str(choices.get(group, ""))


def _no_option(group: str, choice: str, option: str, known: Iterable[str]) -> str:
    names = [name for name in known if name != "name"]
    owner = f"{group} {choice!r}" if choice and group != "model" else group
    guess = did_you_mean(option, names) or "."
    return f"{owner} has no option {option!r}{guess} It has {', '.join(names) or 'none'}"
