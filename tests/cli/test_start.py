"""Modules that a run of the command line does not import: each costs a tenth of a second of its start, or much more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from emssd.__main__ import _spin_briefly
from emssd.model.checkpoint import _MadeEmpty

# What only training, data frames and plots need. Not Dynamo and `accelerate`: Transformers imports them.
HEAVY = (
    "scipy",
    "pandas",
    "matplotlib",
    "sklearn",
    "torchvision",
    "transformers.trainer",
    "emssd_train",
)
PROGRAM = """
import json, os, sys
from emssd.__main__ import main

assert "torch" not in sys.modules  # libgomp reads the environment when torch is imported
main()
assert {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
with open("modules.json", "w") as file:
    json.dump(sorted(sys.modules), file)
"""


@pytest.mark.costly("a process of its own")
def test_heavy_modules_are_not_imported_by_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "data.limit=1", "max_new_tokens=2", "progress=false"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert "emssd.decoding.engine" in modules
    assert [name for name in HEAVY if name in modules] == []


@pytest.mark.parametrize(
    ("mine", "then"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_threads_spin_briefly_unless_the_environment_says_how(
    mine: dict[str, str], then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(mine))
    _spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == then


def test_numbers_for_tensors_without_memory_are_left_out() -> None:
    with _MadeEmpty():
        there, absent = torch.nn.Embedding(2, 3), torch.nn.Embedding(2, 3, device="meta")
    assert absent.weight.is_meta
    assert there.weight.std() > 0
