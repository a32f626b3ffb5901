"""Loaded models and Hydra's store, shared by the commands of these tests, as each would make them anew."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from emssd.cli import command, config
from emssd.cli.config import register_configs
from emssd.hooks.registry import Registry
from emssd.model import ModelOptions, load_model
from emssd.model.load import loading

_OPTIONS: dict[object, DictConfig] = {}
"""The options of plugins as OmegaConf holds them, for all tests; Hydra's store keeps them and hands out copies."""

_STORES: dict[object, dict[str, Any]] = {}
"""The content of Hydra's store with the plugins of emssd alone."""

_MODELS: dict[object, Any] = {}


def without_copies(repo: dict[str, Any]) -> dict[str, Any]:
    """The folders of Hydra's store; it copies what lies in them itself."""
    return {name: without_copies(node) if isinstance(node, dict) else node for name, node in repo.items()}


@pytest.fixture
def loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded models and those of fixtures are loaded once; what a test has made itself is its own."""

    def load(options: ModelOptions, **more: Any) -> Any:
        made = tmp_path / options.path
        if made.is_relative_to(tmp_path) and os.path.exists(made):  # also of a path too long
            return load_model(options, **more)
        key = repr((options, more))
        if key not in _MODELS:
            _MODELS[key] = load_model(options, **more)
        return _MODELS[key]

    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(loading, "gc", SimpleNamespace(collect=lambda: None))  # nothing is dropped


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands share what each would compute anew, or twice. Tests that start `python -m emssd` go the whole way."""
    get_mode, structured = Hydra.get_mode, config.structured

    def mode_if_given(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        """Hydra composes all options once more to see whether they set its mode; here only where they name it."""
        return get_mode(self, config_name, overrides) if "hydra.mode" in " ".join(overrides) else None

    def of_one_store(self: CachingConfigRepository, delegate: IConfigRepository) -> None:
        """Hydra copies its whole store with each look at it, for ``--help`` more than a hundred times."""
        self.delegate, self.cache = copy(delegate), {}

    def structured_once(options: type) -> DictConfig:
        """A plugin's options get a class of their own in each command, with the plugin's name as a field."""
        key = (options.__bases__, vars(options)["name"]) if "name" in vars(options) else options
        if key not in _OPTIONS:
            _OPTIONS[key] = structured(options)
        return _OPTIONS[key]

    def registered_once(registry: Registry, *, runnable: bool = False) -> None:
        """The store of emssd's own plugins is always the same; with a stranger's it is made anew."""
        store, key = ConfigStore.instance(), tuple((record.name, record.state) for record in registry.records)
        if any(record.distribution != "emssd" for record in registry.records):
            register_configs(registry, runnable=runnable)
        elif key in _STORES:
            store.repo = without_copies(_STORES[key])
        else:
            register_configs(registry, runnable=runnable)
            _STORES[key] = without_copies(store.repo)

    monkeypatch.setattr(Hydra, "get_mode", mode_if_given)
    monkeypatch.setattr(CachingConfigRepository, "__init__", of_one_store)
    monkeypatch.setattr(config, "structured", structured_once)
    monkeypatch.setattr(command, "register_configs", registered_once)
