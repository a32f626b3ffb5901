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
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf

from emssd.cli.config import RunConfig, ServeConfig, conf_dir, register_configs
from emssd.cli.jobs import Jobs, SweptRun
from emssd.cli.option_texts import choice_text, option_texts, preset_text, written
from emssd.cli.options import explained, to_objects, to_options
from emssd.cli.terminal import INTERRUPTED
from emssd.data.model_folder import check_folder
from emssd.decoding.options import EngineOptions
from emssd.errors import ConfigError, EmssdError, GroupError, exit_on_error
from emssd.hooks.registry import KINDS, Registry

__all__ = ["main"]

_CHOSEN = ("model", "drafter", "backend", "budget", "data", "sampling")  # whose options --help tells
_COMPARED = ("experiment", "method", "task")
_IN_ORDER = ".BasicLauncher"  # Hydra's own, which runs one job after the other in this process
_INDENT = 32  # columns before the descriptions of options
_WIDEST = 120
_IN_QUOTES = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""


class _Composed(NamedTuple):
    """One run as Hydra composed it: its options, their YAML, by plugin the preset that was chosen, and its place in a
    sweep.
    """

    options: RunConfig
    text: str
    presets: dict[str, str]
    swept: SweptRun | None


def main() -> None:
    """The command, within `emssd.cli.terminal.steady`, which ends it with 2 for an error of the user's, and 130 for
    Ctrl-C. Exits with 1 if a check found a difference, and with 2 if runs of a sweep failed.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # not a line for every attempt to reach the hub
    warnings.showwarning = lambda message, *_, **__: print(f"emssd: warning: {message}", file=sys.stderr)
    if "--version" in sys.argv[1:]:  # Hydra has its own
        print(f"emssd {version('emssd')} (torch {version('torch')}, transformers {version('transformers')})")
        return
    _check_path(sys.argv[1:])
    registry = Registry()
    register_configs(registry, runnable=True)
    OmegaConf.register_new_resolver("emssd_help", partial(_help_text, registry), replace=True)
    is_server = sys.argv[1:2] == ["serve"]
    arguments = _naming_model(sys.argv[2:]) if is_server else sys.argv[1:]
    sys.argv[1:] = [_quoted_prompt(_with_folder(argument)) for argument in arguments]
    _check_flags(sys.argv[1:])
    if is_server:
        _serve(registry)
        return
    with closing(Jobs(registry)) as jobs:
        composed = _compose(jobs, registry)
        for job in composed:
            _run(job, jobs)
        error = jobs.finish()
        if jobs.found_difference:
            sys.exit(1)
        if error is not None:
            raise error


def _compose(jobs: Jobs, registry: Registry) -> list[_Composed]:
    """The runs that this process has to do in order. A launcher that starts processes does them there, and now."""
    composed = list[_Composed]()

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def run(config: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        target, is_sweep = hydra_config.launcher._target_, hydra_config.mode is RunMode.MULTIRUN
        overrides = cast("list[str]", OmegaConf.to_container(hydra_config.overrides.task, resolve=False))
        jobs.in_order = is_sweep and target.endswith(_IN_ORDER)
        jobs.config = config
        with exit_on_error("emssd"):  # here, because Hydra would say more about it
            jobs.callbacks = jobs.callbacks or [instantiate(callback) for callback in hydra_config.callbacks.values()]
            number = int(hydra_config.job.num) if is_sweep else 0
            swept = SweptRun(None, overrides, Path(config.output_dir) / str(number), number)
            options = jobs.attempt(swept, partial(to_options, config, registry, is_sweep=is_sweep))
            if options is None:
                return
            plugins, chosen = {kind: getattr(options, kind).name for kind in KINDS}, hydra_config.runtime.choices
            presets = {f"{kind}={name}": f"{kind}={chosen.get(kind, name)}" for kind, name in plugins.items()}
            if options.experiment is not None and not target.endswith(_IN_ORDER):
                raise ConfigError(
                    "an experiment compares runs that follow one another in one process, and its launcher is "
                    f"{target.rpartition('.')[2]}; leave hydra/launcher= out, or sweep without experiment="
                )
            is_swept = is_sweep or options.experiment is not None
            job = _Composed(
                options, OmegaConf.to_yaml(config), presets, replace(swept, options=options) if is_swept else None
            )
            if is_sweep and not jobs.in_order:
                _run(job, jobs)
            else:
                composed.append(job)

    with explained(registry):
        run()
    total = 1 + max((job.swept.number for job in composed if job.swept), default=0)
    return [job._replace(swept=job.swept and replace(job.swept, total=total)) for job in composed]


def _serve(registry: Registry) -> None:
    composed = list[DictConfig]()

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="serve")
    def compose(config: DictConfig) -> None:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise ConfigError("a server has one set of options, and -m sweeps over several; leave -m out")
        composed.append(config)

    with explained(registry):
        compose()
    for config in composed:  # none with --help
        options = to_objects(config, registry)
        assert isinstance(options, ServeConfig)
        from emssd.cli.serve import run_server

        run_server(options, registry)


def _run(job: _Composed, jobs: Jobs) -> None:
    options, folder = job.options, Path(job.options.output_dir)
    try:
        jobs.run(options, job.text, folder if job.swept is None else job.swept.folder, job.swept)
    except EmssdError as error:
        if jobs.is_silent and jobs.group.is_broken:  # else rank 0 has the same error, and prints it
            sys.stderr = sys.__stderr__
        for plugin, preset in job.presets.items():
            if plugin != preset and (plugin in str(error) or "{} {!r}".format(*plugin.split("=")) in str(error)):
                error.args = (f"{error} ({preset})", *error.args[1:])
        if not isinstance(error, GroupError) or not folder.is_dir():  # only rank 0 writes to it
            raise
        raise GroupError(f"{error}. resume=true output_dir={options.output_dir} goes on from there") from error
    except KeyboardInterrupt:
        if not jobs.is_silent and not any(folder.glob("**/generations.jsonl")):  # nothing is kept
            raise
        again = f"resume=true output_dir={options.output_dir} goes on from there"
        print(f"emssd: interrupted; the rows that were finished are in {folder}/, and {again}", file=sys.stderr)
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
    """Refuse options that are written as flags, such as ``--drafter``, which Hydra would answer with its own usage."""
    names = {field.name for field in (*fields(RunConfig), *fields(ServeConfig))}
    for number, argument in enumerate(arguments, 1):
        flag, has_value, value = argument.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if flag.startswith("--") and name.partition(".")[0] in names:
            value = value if has_value else next(iter(arguments[number:]), "VALUE")
            raise ConfigError(
                f"there is no {flag}; options are written NAME=VALUE, here perhaps {name}={value}; "
                f"python -m emssd --help lists all"
            )


def _naming_model(arguments: list[str]) -> list[str]:
    """The arguments of ``emssd serve``, of which the first may be the model alone."""
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        return arguments
    return [f"model.path={_in_quotes(arguments[0])}", *arguments[1:]]


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
    name, equals, text = argument.partition("=")
    if name not in ("prompt", "sampling.grammar") or text in ("", "null") or re.fullmatch(_IN_QUOTES, text, re.DOTALL):
        return argument
    return f"{name}{equals}{_in_quotes(text)}"


def _in_quotes(text: str) -> str:
    escaped = re.sub(r"(\\*)\$\{", lambda match: rf"{match[1] * 2}\${{", text)
    return str(QuotedString(escaped, Quote.single).with_quotes())


def _help_text(registry: Registry, *, _root_: DictConfig) -> str:
    """The middle of ``--help``: what can be chosen, and the options of what is chosen, with values and descriptions.

    The main config asks for it by ``${emssd_help:}``, in the template that Hydra fills in.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    choices = partial(_choices, registry, _root_, width)
    chosen = [group for group in _CHOSEN if group in _root_]
    lines = ["Choose as GROUP=NAME (* is what is chosen now):", "", *map(choices, chosen)]
    if "experiment" in _root_:  # of a server, it is not
        lines += ["", "  for experiments, which are sweeps of their own, see docs/experiments.md:", ""]
        lines += map(choices, _COMPARED)
    config = RunConfig if "experiment" in _root_ else ServeConfig
    lines += ["", "Set options as NAME=VALUE:", "", *_options(_root_, config, "", width)]
    for group in chosen:
        node = _root_._get_node(group)
        if isinstance(node, DictConfig) and isinstance(kind := OmegaConf.get_type(node), type) and kind is not dict:
            options = [*_options(node, kind, f"{group}.", width)]
            name = f"{group}={_root_.hydra.runtime.choices.get(group)}"
            lines += ["", f"Options of {name}:", "", *options] if options else ["", f"{name} has no options."]
    return "\n".join(lines).replace("$", "$$")  # Hydra fills in what follows a single one


def _choices(registry: Registry, root: DictConfig, width: int, group: str) -> str:
    there = GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)
    names = sorted({*there, *(registry.names(group) if group in KINDS else ())})
    chosen = root.hydra.runtime.choices.get(group)
    starred = {name: f"{name}*" if name == chosen else name for name in names}
    if group not in KINDS:
        names_text = ", ".join(starred.values())
        return textwrap.fill(names_text, width, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
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
        line = f"  {prefix}{option.name}={'VALUE' if value == MISSING else written(value)}"
        text = _first_sentence(option.text) + (" (needed)" if value == MISSING else "")
        if len(line) >= _INDENT - 1 or not text:
            yield line
            line = ""
        if text:
            indent = " " * _INDENT
            yield textwrap.fill(text, width, initial_indent=line.ljust(_INDENT), subsequent_indent=indent)


def _first_sentence(text: str) -> str:
    """Enough for a list; the page of options has the whole text."""
    return re.split(r"(?<=[\w`)])\. (?!\d)", text)[0].rstrip(".")
