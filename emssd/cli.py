"""The command line: composes the options with Hydra, hands them to `emssd.job`, and prints errors as sentences."""

from __future__ import annotations

import os
import re
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MissingMandatoryValue, OmegaConf

from emssd.config import DEFAULT_OUTPUT_DIR, RunConfig, Size, conf_dir, register_configs
from emssd.errors import ConfigError, EmssdError, did_you_mean
from emssd.jobs import Jobs
from emssd.option_names import check_composed, check_given
from emssd.registry import KINDS, Registry

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main"]

_GROUPS = ("model", "experiment", "method", "task")
_OTHER_CONFIG = {"--config-path", "-cp", "--config-name", "-cn"}


def main() -> None:
    """Entry point of ``emssd`` and ``python -m emssd``. Exits with 2 for an error of the user's, 130 for Ctrl-C."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # not a line for every attempt to reach the hub
    warnings.showwarning = lambda message, *_, **__: print(f"emssd: warning: {message}", file=sys.stderr)
    try:
        registry = Registry()
        register_configs(registry)
        _check_choices(sys.argv[1:], registry)
        with closing(Jobs(registry)) as jobs:
            _compose_and_run(jobs)
    except EmssdError as error:
        _fail(error)
    except KeyboardInterrupt:
        _leave("interrupted")


def _compose_and_run(jobs: Jobs) -> None:
    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def run(config: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        sweep = Path(config.output_dir)
        is_sweep = hydra_config.mode is RunMode.MULTIRUN
        number = int(hydra_config.job.num) if is_sweep else 0
        overrides = list(hydra_config.overrides.task)
        try:
            options = _options(config)
            if options.experiment is not None:
                _check_launcher(hydra_config.launcher._target_)
                jobs.run_of_experiment(options, OmegaConf.to_yaml(config), sweep, number, overrides)
            else:
                jobs.run(options, OmegaConf.to_yaml(config), sweep / str(number) if is_sweep else sweep)
        except EmssdError as error:
            _fail(error)  # here, because Hydra would print a traceback of it
        except KeyboardInterrupt:
            again = f"resume=true output_dir={config.output_dir}"
            _leave(f"interrupted; the rows that were finished are in {sweep}/, and {again} goes on from there")

    run()
    jobs.finish()


def _check_launcher(target: str) -> None:
    """The rows of an experiment go to one file, and its runs are compared, so they must follow one another.

    Raises:
        ConfigError: another launcher was chosen.
    """
    if not target.endswith(".BasicLauncher"):
        raise ConfigError(
            "an experiment compares runs that follow one another in one process, and its launcher is "
            f"{target.rpartition('.')[2]}; leave hydra/launcher= out, or sweep without experiment="
        )


def _options(config: DictConfig) -> RunConfig:
    """The composed options as dataclasses.

    Raises:
        ConfigError: one that has no default is not given, or ``resume`` without a folder.
    """
    check_composed(config)
    try:
        options = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not given and has no default; add {error.full_key}=VALUE") from error
    assert isinstance(options, RunConfig)
    if options.resume and DEFAULT_OUTPUT_DIR in OmegaConf.to_yaml(config):
        raise ConfigError("resume=true goes on with the job of a folder; say which, with output_dir=FOLDER")
    return options


def _check_choices(arguments: list[str], registry: Registry) -> None:
    """Explain ``drafter=NAME`` and its like better than a missing config file would.

    Raises:
        PluginError: there is no such name, a plugin of that name failed to load, or it cannot run here.
        ConfigError: there is no such preset, option, or size of an experiment.
    """
    if _OTHER_CONFIG & {argument.partition("=")[0] for argument in arguments}:
        return  # another main config, whose defaults only Hydra knows
    own = _own_presets(arguments)
    chosen = {"experiment": "", "size": "small"}
    for argument in arguments:
        group, given, value = argument.partition("=")
        for name in value.split(",") if given and group in (*KINDS, *_GROUPS, "size") else ():
            chosen[group] = name
            presets = [*Size] if group == "size" else _presets(group)
            if name in presets or (own and (own / group / f"{name}.yaml").is_file()):
                continue
            if not re.fullmatch(r"[\w.-]*", name):  # Hydra judges its sweep functions itself
                continue
            if group in KINDS:
                registry.find(group, name, presets)
            elif (group, name) != ("model", "hf"):
                raise ConfigError(_no_preset(group, name, presets))
    check_given(arguments, registry, conf_dir(), own)
    if chosen["experiment"] in _presets("experiment"):
        _check_size(chosen["experiment"], chosen["size"])


def _own_presets(arguments: list[str]) -> Path | None:
    """The folder of ``--config-dir``.

    Raises:
        ConfigError: it is not there.
    """
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
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


def _leave(why: str) -> NoReturn:
    """End as a program does that Ctrl-C has stopped."""
    print(f"emssd: {why}", file=sys.stderr)
    sys.exit(130)


def _fail(error: EmssdError) -> NoReturn:
    print(f"emssd: error: {error}", file=sys.stderr)
    sys.exit(2)
