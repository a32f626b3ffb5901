"""The middle of ``--help``: what can be chosen, and the options of what is chosen, with their values and descriptions.

The main config asks for it through a resolver, ``${emssd_help:}``, in the template that Hydra fills in.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import MISSING, DictConfig, OmegaConf

from emssd.cli.docstrings import attributes
from emssd.cli.option_texts import option_texts, written
from emssd.decoding.options import EngineOptions
from emssd.jobs.config import RunConfig

__all__ = ["register_help"]

_CHOSEN = ("model", "drafter", "backend", "budget", "data")  # whose options are told
_COMPARED = ("experiment", "method", "task")
_INDENT = 32  # columns before the descriptions
_WIDEST = 120


def register_help() -> None:
    """Let the main config ask for the text."""
    OmegaConf.register_new_resolver("emssd_help", _help_text, replace=True)


def _help_text(*, _root_: DictConfig) -> str:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    lines = ["Choose as GROUP=NAME (* is what is chosen now):", ""]
    for group in _CHOSEN:
        lines += _choices(_root_, group, width)
    lines += ["", "  for experiments, which are sweeps of their own, see docs/experiments.md:", ""]
    for group in _COMPARED:
        lines += _choices(_root_, group, width)
    lines += ["", "Set options as NAME=VALUE:", ""]
    lines += _options(_root_, RunConfig, "", width)
    for group in _CHOSEN:
        node = _root_._get_node(group)
        assert isinstance(node, DictConfig)
        kind = OmegaConf.get_type(node)
        if dataclasses.is_dataclass(kind):  # not of a group that was taken out, with ~GROUP
            told = [*_options(node, kind, f"{group}.", width)]
            name = _root_.hydra.runtime.choices.get(group)
            lines += ["", f"Options of {group}={name}:" if told else f"{group}={name} has no options."]
            lines += ["", *told] if told else []
    return "\n".join(lines).replace("$", "$$")  # Hydra fills in what follows a single one


def _choices(root: DictConfig, group: str, width: int) -> list[str]:
    names = GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)
    chosen = root.hydra.runtime.choices.get(group)
    text = ", ".join(f"{name}*" if name == chosen else name for name in sorted(names))
    return textwrap.wrap(text, width, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)


def _options(node: DictConfig, kind: type, prefix: str, width: int) -> Iterator[str]:
    texts, values = attributes(kind), OmegaConf.to_container(node, resolve=False)
    assert isinstance(values, dict)
    engine = {field.name for field in dataclasses.fields(EngineOptions)} if not prefix else set()
    for option in sorted(option_texts(kind), key=lambda option: option.name in engine):  # first what a newcomer sets
        if (option.name in (*_CHOSEN, *_COMPARED) and not prefix) or option.name == "name":
            continue
        value = values.get(option.name)
        said = f"  {prefix}{option.name}={'VALUE' if value == MISSING else written(value)}"
        text = _first_sentence(texts.get(option.name, "")) + (" (needed)" if value == MISSING else "")
        described = textwrap.wrap(text, width, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT)
        if described and len(said) < _INDENT - 1:
            described[0] = said + described[0][len(said) :]
            said = ""
        yield from [said] * bool(said) + described


def _first_sentence(text: str) -> str:
    """Enough for a list; the page of options has the whole text."""
    return re.split(r"(?<=[\w`)])\. ", text)[0].rstrip(".")
