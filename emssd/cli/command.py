"""The command line: composes the options with Hydra, hands them to `emssd.cli.job`, and prints errors as sentences."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from emssd.cli.config import STDOUT, RunConfig, conf_dir, register_configs
from emssd.cli.jobs import Jobs
from emssd.cli.option_texts import choice_text, option_texts, preset_text, written
from emssd.cli.options import explained, to_options
from emssd.data.model_folder import check_folder
from emssd.decoding.options import EngineOptions
from emssd.errors import ConfigError, EmssdError, GroupError, exit_on_error
from emssd.errors.terminal import INTERRUPTED
from emssd.errors.version import __version__
from emssd.plugins.registry import KINDS, Registry

__all__ = ["main"]

_CHOSEN = ("model", "drafter", "backend", "budget", "data", "sampling")  # whose options --help tells
_COMPARED = ("experiment", "method", "task")
_IN_ORDER = ".BasicLauncher"  # Hydra's own, which runs one job after the other in this process
_INDENT = 32  # columns before the descriptions of options
_WIDEST = 120
_IN_QUOTES = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""


class _OwnFault(BaseException):
    """Holds an exception that is no error of the user's: no `Exception`, which Hydra would comment on."""


def main() -> None:
    """The command, within `emssd.errors.terminal.steady`, which ends it with 2 for an error of the user's, and 130 for
    Ctrl-C. Exits with 1 if a check found a difference, and with 2 if runs of a sweep failed.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # not a line for every attempt to reach the hub
    warnings.showwarning = lambda message, *_, **__: print(f"emssd: warning: {message}", file=sys.stderr)
    if "--version" in sys.argv[1:]:  # Hydra has its own
        print(f"emssd {__version__} (torch {version('torch')}, transformers {version('transformers')})")
        return
    _check_path(sys.argv[1:])
    registry = Registry()
    register_configs(registry, runnable=True)
    OmegaConf.register_new_resolver("emssd_help", partial(_help_text, registry), replace=True)
    sys.argv[1:] = [_quoted_prompt(_with_folder(argument)) for argument in sys.argv[1:]]
    _check_flags(sys.argv[1:])
    with closing(Jobs(registry)) as jobs:
        _compose_and_run(jobs, registry)
        error = jobs.finish()
        if jobs.found_difference:
            sys.exit(1)
        if error is not None:
            raise error


def _compose_and_run(jobs: Jobs, registry: Registry) -> None:
    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def run(config: DictConfig) -> None:
        with exit_on_error("emssd"):  # here, because Hydra would say more about it
            try:
                _run(config, jobs, registry)
            except EmssdError:
                if jobs.is_silent and jobs.group.is_broken:  # else rank 0 has the same error, and prints it
                    sys.stderr = sys.__stderr__
                raise
            except Exception as error:
                raise _OwnFault(error) from error

    try:
        with explained(registry):
            run()
    except _OwnFault as fault:
        raise fault.args[0] from None


def _run(config: DictConfig, jobs: Jobs, registry: Registry) -> None:
    hydra_config = HydraConfig.get()
    is_sweep = hydra_config.mode is RunMode.MULTIRUN
    overrides = cast("list[str]", OmegaConf.to_container(hydra_config.overrides.task, resolve=False))
    jobs.in_order = is_sweep and hydra_config.launcher._target_.endswith(_IN_ORDER)
    options = jobs.attempt(overrides, partial(to_options, config, overrides, registry, is_sweep=is_sweep))
    if options is None:
        return
    text, folder = OmegaConf.to_yaml(config), Path(options.output_dir)
    number = int(hydra_config.job.num) if is_sweep else 0
    try:
        if options.experiment is not None:
            _check_launcher(hydra_config.launcher._target_)
            jobs.run_of_experiment(options, text, folder, number, overrides, _num_jobs(hydra_config))
        elif is_sweep:
            jobs.attempt(overrides, partial(jobs.run, options, text, folder / str(number), overrides))
        else:
            jobs.run(options, text, folder)
    except GroupError as error:
        if not folder.is_dir():  # only process 0 writes to it
            raise
        raise GroupError(f"{error}. resume=true output_dir={options.output_dir} goes on from there") from error
    except KeyboardInterrupt:
        if options.output_dir == STDOUT and not jobs.is_silent:
            raise
        again = f"resume=true output_dir={options.output_dir}"
        said = f"the rows that were finished are in {folder}/, and {again} goes on from there"
        print(f"emssd: interrupted; {said}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _check_path(arguments: list[str]) -> None:
    """Refuse a ``model.path`` that holds no model now: what follows imports torch and Transformers, for seconds."""
    if any(argument.startswith(("-", "experiment=")) or "architecture" in argument for argument in arguments):
        return  # it may be no run at all, or the path only a name
    for argument in arguments:
        name, _, path = argument.partition("=")
        if name == "model.path" and not re.search(r"""[,'"$()\[\]{}\\]""", path):  # else it is Hydra's to read
            check_folder(path)


def _check_flags(arguments: list[str]) -> None:
    """Refuse flags such as ``--drafter``, which Hydra would answer with its own usage."""
    _, unknown = get_args_parser().parse_known_args(arguments)
    for flag in (each for each in unknown if each.startswith("-")):
        given, has_value, value = flag.partition("=")
        if not has_value:
            value = next(iter(arguments[arguments.index(flag) + 1 :]), "VALUE")
        name = given.lstrip("-").replace("-", "_")
        raise ConfigError(
            f"there is no {given}; options are written NAME=VALUE, here perhaps {name}={value}; "
            f"python -m emssd --help lists all"
        )


def _num_jobs(config: HydraConf) -> int:
    """The number of jobs in the sweep of this command, from its experiment and its arguments."""
    given = [f"{name}={value}" for name, value in (config.sweeper.get("params") or {}).items()]
    given += [argument for argument in sys.argv[1:] if re.match("[^-=][^=]*=", argument)]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    last = {override.get_key_element(): override for override in parser.parse_overrides(given)}.values()
    return prod(len([*override.sweep_string_iterator()]) for override in last if override.is_sweep_override())


def _check_launcher(target: str) -> None:
    """The rows of an experiment go to one file, and its runs are compared, so they must follow one another."""
    if not target.endswith(_IN_ORDER):
        raise ConfigError(
            "an experiment compares runs that follow one another in one process, and its launcher is "
            f"{target.rpartition('.')[2]}; leave hydra/launcher= out, or sweep without experiment="
        )


def _with_folder(argument: str) -> str:
    """``output_dir=~/x`` with the user's own folder, as Hydra makes that of a sweep; any other argument as it is."""
    name, _, folder = argument.partition("=")
    if name != "output_dir":
        return argument
    if re.match(r"\W?\w+://", folder):
        raise ConfigError(f"output_dir is the address {folder}, and rows go to a folder of this machine; give its path")
    return f"{name}={Path(folder).expanduser()}" if folder.startswith("~") else argument


def _quoted_prompt(argument: str) -> str:
    """``prompt=TEXT`` so that Hydra and OmegaConf take TEXT as it stands; any other argument as it is.

    One that is in Hydra's quotes already is left to Hydra.
    """
    name, given, text = argument.partition("=")
    if name not in ("prompt", "sampling.grammar") or text in ("", "null") or re.fullmatch(_IN_QUOTES, text, re.DOTALL):
        return argument
    escaped = re.sub(r"(\\*)\$\{", lambda match: rf"{match[1] * 2}\${{", text)
    return f"{name}{given}{QuotedString(escaped, Quote.single).with_quotes()}"


def _help_text(registry: Registry, *, _root_: DictConfig) -> str:
    """The middle of ``--help``: what can be chosen, and the options of what is chosen, with values and descriptions.

    The main config asks for it by ``${emssd_help:}``, in the template that Hydra fills in.
    """
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
