"""The middle of ``--help``: what can be chosen, and the options of what is chosen, with their values and descriptions.

The main config asks for it through a resolver, ``${emssd_help:}``, in the template that Hydra fills in.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from functools import partial

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import MISSING, DictConfig, OmegaConf

from emssd.cli.config import RunConfig, conf_dir
from emssd.cli.option_texts import choice_text, option_texts, preset_text, written
from emssd.decoding.options import EngineOptions
from emssd.plugins.registry import KINDS, Registry

__all__ = ["register_help"]

_CHOSEN = ("model", "drafter", "backend", "budget", "data", "sampling", "cluster")  # whose options are told
_COMPARED = ("experiment", "method", "task")
_INDENT = 32  # columns before the descriptions
_WIDEST = 120


def register_help(registry: Registry) -> None:
    """Let the main config ask for the text; `registry` also knows what cannot run on this machine."""
    OmegaConf.register_new_resolver("emssd_help", partial(_help_text, registry), replace=True)


def _help_text(registry: Registry, *, _root_: DictConfig) -> str:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    choices = partial(_choices, registry, _root_, width)
    lines = ["Choose as GROUP=NAME (* is what is chosen now):", "", *map(choices, _CHOSEN)]
    lines += ["", "  for experiments, which are sweeps of their own, see docs/experiments.md:", ""]
    lines += [*map(choices, _COMPARED), "", "Set options as NAME=VALUE:", "", *_options(_root_, RunConfig, "", width)]
    for group in _CHOSEN:
        node = _root_._get_node(group)
        if isinstance(node, DictConfig) and isinstance(kind := OmegaConf.get_type(node), type) and kind is not dict:
            told = [*_options(node, kind, f"{group}.", width)]
            name = f"{group}={_root_.hydra.runtime.choices.get(group)}"
            lines += ["", f"Options of {name}:", "", *told] if told else ["", f"{name} has no options."]
    return "\n".join(lines).replace("$", "$$")  # Hydra fills in what follows a single one


def _choices(registry: Registry, root: DictConfig, width: int, group: str) -> str:
    there = GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)
    names = sorted({*there, *(registry.names(group) if group in KINDS else ())})
    chosen = root.hydra.runtime.choices.get(group)
    starred = {name: f"{name}*" if name == chosen else name for name in names}
    if group not in KINDS:
        said = ", ".join(starred.values())
        return textwrap.fill(said, width, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
    texts = {spec.name: choice_text(f"{group}={spec.name}", spec.config) for spec in registry.specs(group)}
    texts |= {path.stem: preset_text(path) for path in (conf_dir() / group).glob("*.yaml")}
    room = max(width - 26, 20)
    shown = [textwrap.shorten(_first_sentence(texts.get(name, "")), room, placeholder=" …") for name in names]
    return "\n".join(
        [f"  {group}", *(f"    {starred[name]:<21} {text}" for name, text in zip(names, shown, strict=True))]
    )


def _options(node: DictConfig, kind: type, prefix: str, width: int) -> Iterator[str]:
    engine = [option.name for option in option_texts(EngineOptions)] if not prefix else []
    for option in sorted(option_texts(kind), key=lambda option: option.name in engine):  # first what a newcomer sets
        if (option.name in (*_CHOSEN, *_COMPARED) and not prefix) or option.name == "name":
            continue
        value = OmegaConf.to_container(node, resolve=False).get(option.name)  # type: ignore[union-attr]
        said = f"  {prefix}{option.name}={'VALUE' if value == MISSING else written(value)}"
        text = _first_sentence(option.text) + (" (needed)" if value == MISSING else "")
        if len(said) >= _INDENT - 1 or not text:
            yield said
            said = ""
        if text:
            indent = " " * _INDENT
            yield textwrap.fill(text, width, initial_indent=said.ljust(_INDENT), subsequent_indent=indent)


def _first_sentence(text: str) -> str:
    """Enough for a list; the page of options has the whole text."""
    return re.split(r"(?<=[\w`)])\. (?!\d)", text)[0].rstrip(".")
