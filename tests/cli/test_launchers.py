"""An experiment with a launcher that would run its jobs elsewhere is refused, as docs/how_to/sweeps.md says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> str:
    """The option that chooses a launcher which is not Hydra's own."""
    known = Plugins.instance().class_name_to_class
    package, module = ModuleType("hydra_plugins"), ModuleType("hydra_plugins.stand_in")
    stand_in = type("JoblibLauncher", (BasicLauncher,), {"__module__": module.__name__})
    module.JoblibLauncher, package.stand_in = stand_in, module
    for each in (package, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    name = f"{module.__name__}.JoblibLauncher"
    monkeypatch.setitem(known, name, stand_in)
    return f"hydra.launcher._target_={name}"


def test_an_experiment_with_another_launcher_ends_before_anything_runs(launcher: str, emssd: Callable) -> None:
    result = emssd("-m", "experiment=fig1", "size=toy", "output_dir=out", launcher)
    page = Path(__file__).resolve().parents[2] / "docs" / "how_to" / "sweeps.md"
    (said,) = re.findall(r"With another launcher nothing runs: `([^`]*)`", page.read_text(encoding="utf-8"))
    assert result.sentence == " ".join(said.split())
    assert not (result.folder / "rows.jsonl").exists()


def test_a_sweep_takes_any_launcher(launcher: str, emssd: Callable) -> None:
    few = ("data.limit=1", "max_new_tokens=2", "output_dir=out", "progress=false")
    assert emssd("-m", "drafter=none,llma", *few, launcher).status == 0
