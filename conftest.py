"""Settings of the whole test suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # tiny tensors; two test processes with two threads each are slower than four with one

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=30, **_COMMON)
settings.register_profile("thorough", max_examples=300, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """A plugin that fails to load is an error; named here, as pytest.ini would import emssd before coverage starts."""
    config.addinivalue_line("filterwarnings", "error::emssd.registry.PluginWarning")


def _shared() -> Path:
    return Path(__file__).resolve().parents[1] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the trained pair and the real prompts; not part of the project."""
    folder = _shared()
    if not folder.is_dir():
        pytest.skip("the folder ../shared with the trained model pair and real prompts is not here")
    return folder
