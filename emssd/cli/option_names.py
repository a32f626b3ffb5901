"""Explains a misspelt option better than Hydra would, before anything is composed; and after, one that slipped in."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from emssd.cli.usage import no_option
from emssd.errors import ConfigError, did_you_mean
from emssd.jobs.config import ModelConfig, RunConfig, Size, conf_dir
from emssd.plugins.registry import KINDS, Registry

__all__ = ["check_arguments", "check_composed", "quoted_prompt"]

# Completion has arguments of its own, and of another main config only Hydra knows the defaults.
_LEFT_TO_HYDRA = {"--config-path", "-cp", "--config-name", "-cn", "--shell-completion", "-sc"}
_GROUPS = ("model", "experiment", "method", "task")
_IN_QUOTES = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_CHANGERS = ("experiment", "task", "method")  # choices that change other choices


def check_arguments(arguments: list[str], registry: Registry) -> None:
    """Explain ``drafter=NAME`` and its like better than a missing config file would.

    Raises:
        PluginError: there is no such name, a plugin of that name failed to load, or it cannot run here.
        ConfigError: there is no such preset, option, or size of an experiment.
    """
    if _LEFT_TO_HYDRA & {argument.partition("=")[0] for argument in arguments}:
        return
    own = _own_presets(arguments)
    chosen = {"experiment": "", "size": "small"}
    for argument in arguments:
        group, given, value = argument.lstrip("+").partition("=")
        if not given or group not in (*KINDS, *_GROUPS, "size"):
            continue
        presets = [*Size] if group == "size" else _presets(group)
        if value.startswith(("{", "[")):
            known = ", ".join(sorted({*presets, *(registry.names(group) if group in KINDS else ())}))
            raise ConfigError(f"{argument} is no choice; write {group}=NAME, with one of {known}")
        for name in value.split(","):
            chosen[group] = name
            if re.search(r"[()$'\"\\]", name) or len(name) > 100:  # Hydra judges its sweep functions itself
                continue
            if name in presets or (own and (own / group / f"{name}.yaml").is_file()):
                continue
            if group in KINDS:
                registry.find(group, name, presets)
            elif (group, name) != ("model", "hf"):
                raise ConfigError(_no_preset(group, name, presets))
    _check_given(arguments, registry, conf_dir(), own)
    if chosen["experiment"] in _presets("experiment"):
        _check_size(chosen["experiment"], chosen["size"])


def _own_presets(arguments: list[str]) -> Path | None:
    """The folder of ``--config-dir``.

    Raises:
        ConfigError: it is not there.
    """
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, given, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = Path(value if given else following)
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {folder} is no folder; give one of presets, as in drafter/NAME.yaml")
            return folder
    return None


def _check_size(experiment: str, size: str) -> None:
    sizes = OmegaConf.select(OmegaConf.load(conf_dir() / "experiment" / f"{experiment}.yaml"), "experiment.sizes") or {}
    missing = [name for name in sizes if sizes[name] is None]  # an experiment says so itself
    if size in missing:
        there = ", ".join(each for each in Size if each not in missing)
        raise ConfigError(f"experiment={experiment} has no size {size!r}; choose one of {there}")


def _no_preset(group: str, name: str, presets: list[str]) -> str:
    guess = did_you_mean(name, presets) or ";"
    if group == "model":
        return (
            f"unknown model preset {name!r}{guess} presets are {', '.join(presets)}. "
            f"For a folder or an id of the Hugging Face hub write model.path={name}"
        )
    return f"unknown {group} {name!r}{guess} choose one of {', '.join(presets)}"


def _presets(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _check_given(arguments: Seq[str], registry: Registry, conf: Path, own: Path | None = None) -> None:
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
            raise ConfigError(no_option(group, given.get(group, _default(group, conf)), first, known))


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
                    raise ConfigError(no_option(str(group), str(node.get("name", "")), str(option), known))
    known = [field.name for field in dataclasses.fields(RunConfig)]
    for option in config:
        if option not in known:
            raise ConfigError(f"there is no option {option!r}{did_you_mean(str(option), known)}")


def quoted_prompt(argument: str) -> str:
    """``prompt=TEXT`` so that Hydra and OmegaConf take TEXT as it stands; any other argument as it is.

    One that is in Hydra's quotes already is left to Hydra.
    """
    name, given, text = argument.partition("=")
    if name != "prompt" or text in ("", "null") or re.fullmatch(_IN_QUOTES, text, re.DOTALL):
        return argument
    escaped = re.sub(r"(\\*)\$\{", lambda match: rf"{match[1] * 2}\${{", text)
    return f"{name}{given}{QuotedString(escaped, Quote.single).with_quotes()}"


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
