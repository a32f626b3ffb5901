"""The options: every preset composes, help lists what is installed, and a default is written down once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from emssd.config import ModelConfig, RunConfig, conf_dir, register_configs
from emssd.registry import KINDS, Registry

PRESETS = sorted(path for path in conf_dir().glob("*/*.yaml") if path.parent.name in (*KINDS, "model"))


@pytest.fixture(scope="module", autouse=True)
def store() -> Registry:
    registry = Registry()
    register_configs(registry)
    return registry


def compose(*overrides: str) -> RunConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = hydra.compose("config", list(overrides))
    options = OmegaConf.to_object(config)
    assert isinstance(options, RunConfig)
    return options


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_preset_composes_to_its_plugins_dataclass(path: Path, store: Registry) -> None:
    options = compose(f"{path.parent.name}={path.stem}")
    chosen = getattr(options, path.parent.name)
    if path.parent.name == "model":
        assert isinstance(chosen, ModelConfig)
    else:
        assert isinstance(chosen, store.find(path.parent.name, chosen.name).config)
    for key, value in OmegaConf.load(path).items():
        if key != "defaults":
            assert getattr(chosen, str(key)) == value


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_a_preset_says_only_what_differs(path: Path, store: Registry) -> None:
    preset = OmegaConf.load(path)
    (base,) = preset.defaults
    defaults = ModelConfig if path.parent.name == "model" else store.find(path.parent.name, base).config
    same = {
        field.name
        for field in dataclasses.fields(defaults)
        if field.name in preset and preset[field.name] == field.default
    }
    assert same <= ({"path"} if path.stem == "demo" else set())  # the demo preset is there for its name


def test_the_main_config_sets_no_option() -> None:
    keys = {str(key) for key in OmegaConf.load(conf_dir() / "config.yaml")}
    assert keys == {"defaults", "hydra"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_installed_plugin_composes_to_its_defaults(kind: str, store: Registry) -> None:
    for spec in store.specs(kind):
        chosen = getattr(compose(f"{kind}={spec.name}"), kind) if _has_defaults(spec.config) else None
        for field in dataclasses.fields(spec.config) if chosen else ():
            if field.default is not dataclasses.MISSING:
                assert getattr(chosen, field.name) == field.default


def _has_defaults(config: type) -> bool:
    return all(field.default != "???" for field in dataclasses.fields(config))


def test_help_lists_everything_installed_and_every_option(emssd: Callable, store: Registry) -> None:
    result = emssd("--help")
    assert result.status == 0
    for kind in KINDS:
        (line,) = [line for line in result.out.splitlines() if line.startswith(f"{kind}: ")]
        listed = line.partition(": ")[2].split(", ")
        assert set(listed) == {*store.names(kind), *(path.stem for path in PRESETS if path.parent.name == kind)}
    for field in dataclasses.fields(RunConfig):
        assert f"\n{field.name}:" in result.out
    assert "\n  compile: false\n" in result.out
    assert "\n  kernels: auto\n" in result.out


def test_cfg_job_shows_the_result_without_running(emssd: Callable) -> None:
    result = emssd("drafter=llma", "drafter.match_length=3", "backend=unpad_kv", "--cfg", "job")
    config = OmegaConf.create(result.out)
    assert config.drafter == {
        "match_length": 3, "copy_length": 7, "search": "prompt", "occurrence": "last", "require_full_copy": True,
        "name": "llma",
    }  # fmt: skip
    assert config.backend == {"pad_kv": False, "pad_inputs": True, "name": "padded"}
    assert config.batch_size == RunConfig.batch_size
