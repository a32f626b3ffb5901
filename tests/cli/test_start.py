"""Modules that a run of the command line does not import: each costs a tenth of a second of its start, or much more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import import_utils as utils

from emssd.__main__ import _spin_briefly
from emssd.jobs.imports import _read_once
from emssd.model.checkpoint import _MadeEmpty

# What only compilers, several devices, training, data frames and plots need. Not `accelerate`: Transformers takes it
# wherever it is installed.
HEAVY = (
    "torch._dynamo.symbolic_convert",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "sympy",
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

import torch  # and Dynamo is whole if something needs it later

assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
assert torch._dynamo.utils.counters
"""


@pytest.mark.costly("a process of its own, and a compiler in it")
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


def test_what_models_define_is_read_once_and_the_same() -> None:
    models = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    right = utils.define_import_structure(models)
    with _read_once():
        assert utils.define_import_structure(models) == right
    assert utils.define_import_structure(models) is right  # Transformers' own again


def test_numbers_for_tensors_without_memory_are_left_out() -> None:
    with _MadeEmpty():
        there, absent = torch.nn.Embedding(2, 3), torch.nn.Embedding(2, 3, device="meta")
    assert absent.weight.is_meta
    assert there.weight.std() > 0
