"""The command line: composes the options with Hydra, hands them to `emssd.job`, and prints errors as sentences."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from emssd.config import RunConfig, conf_dir, register_configs
from emssd.errors import EmssdError, PluginError
from emssd.registry import KINDS, Registry

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main"]


def main() -> None:
    """Entry point of ``emssd`` and ``python -m emssd``. Exits with 2 for an error of the user's, 130 for Ctrl-C."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.showwarning = lambda message, *_, **__: print(f"emssd: warning: {message}", file=sys.stderr)
    try:
        registry = Registry()
        _check_choices(sys.argv[1:], registry)
    except EmssdError as error:
        _fail(error)
    register_configs(registry)

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def run(config: DictConfig) -> None:
        from emssd.job import run_job

        try:
            output_dir = Path(config.output_dir)
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                output_dir /= str(HydraConfig.get().job.num)
            options = OmegaConf.to_object(config)
            assert isinstance(options, RunConfig)
            run_job(options, output_dir, OmegaConf.to_yaml(config), registry)
        except EmssdError as error:
            _fail(error)
        except KeyboardInterrupt:
            print("emssd: interrupted; what was finished is in the output folder", file=sys.stderr)
            sys.exit(130)

    run()


def _check_choices(arguments: list[str], registry: Registry) -> None:
    """Explain ``drafter=NAME`` and ``backend=NAME`` better than a missing config file would.

    Raises:
        PluginError: a plugin of that name failed to load, or cannot run here.
    """
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and key in KINDS:
            for name in value.split(","):
                if not _has_preset(key, name):
                    registry.find(key, name)
        if separator and key == "model" and not _has_preset("model", value) and value != "hf":
            presets = ", ".join(sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml")))
            raise PluginError(
                f"unknown model preset {value!r}; presets are {presets}. "
                f"For a folder or an id of the Hugging Face hub write model.path={value}"
            )


def _has_preset(group: str, name: str) -> bool:
    return (conf_dir() / group / f"{name}.yaml").is_file()


def _fail(error: EmssdError) -> None:
    print(f"emssd: error: {error}", file=sys.stderr)
    sys.exit(2)
