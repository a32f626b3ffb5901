"""The programs of ``benchmarks/``, as modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``load(name)`` imports a module of the benchmarks as these do themselves."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
