"""The parts of a GPU session: that they fit into their time and into what can be carried, and that a dry run works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import BENCHMARKS
from tests.support.tiers import looped

ROOT = BENCHMARKS.parent
WHEELS = {  # bytes, for Python 3.12 on Linux
    "flashinfer_python-0.6.18.post1": 18_348_022,
    "apache_tvm_ffi-0.1.15.post2": 3_312_304,
    "msgspec-0.22.0": 230_377,
    "hydra_core-1.3.2": 154_547,
    "omegaconf-2.3.1": 79_502,
    "antlr4_python3_runtime-4.9.3": 144_590,
}
KERNEL_BYTES = 2_076_304 + 166_928  # heads of 128 in float16, and the packing of masks, built for 9.0a


@pytest.fixture
def bundle(load: Any, tmp_path: Path) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout knows its files and its commit")
    load("gpu_bundle").write(tmp_path / "bundle")
    return tmp_path / "bundle"


@looped("part", range(1, 4))
def test_a_part_fits_into_its_ten_minutes(load: Any, part: int) -> None:
    parts = load("gpu_parts")
    steps = parts.plan(Path("results"), Path("kernels"))[part]
    assert parts.PREPARATION_SECONDS + sum(step.limit for step in steps) <= parts.PART_SECONDS <= 600 - 2 * parts.GRACE
    assert all(step.limit > 3 * parts.GRACE for step in steps if step.command), "nothing is cut off as it starts"
    limits = re.findall(r"timeout (\d+)", (BENCHMARKS / "gpu_run.sh").read_text())
    assert parts.PREPARATION_SECONDS < sum(map(int, limits)) <= parts.PART_SECONDS / 2, "a cold machine takes longer"


def test_a_step_at_its_limit_is_interrupted_and_the_next_one_runs(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = load("gpu_parts")
    monkeypatch.setattr(parts, "GRACE", 3)
    polite = f"trap 'touch {tmp_path}/written; exit' INT; touch {tmp_path}/begun; sleep 60 & wait"
    deaf = "trap '' INT; sleep 60 & wait"
    steps = [
        parts.Step("polite", 6, ("bash", "-c", polite)),
        parts.Step("deaf", 5, ("bash", "-c", deaf)),
        parts.Step("wrong", 5, ("false",)),
        parts.Step("absent", 5, skipped="none here"),
        parts.Step("right", 1, ("true",)),
    ]
    start = time.monotonic()
    assert not parts.run_part("part9", steps, tmp_path, 30)
    assert time.monotonic() - start < 30
    rows = json.loads((tmp_path / "part9.json").read_text())
    assert [row["ended"] for row in rows] == ["cut off", "cut off", "exit status 1", "skipped: none here", "well"]
    assert (tmp_path / "written").exists()
    assert rows[-1]["limit"] > 1, "the last one has what is left"


def test_where_the_device_failed_the_step_goes_on_in_a_new_process(load: Any, tmp_path: Path) -> None:
    parts, count = load("gpu_parts"), tmp_path / "count"
    script = f"echo x >>{count}; [ $(wc -l <{count}) -ge 3 ] || exit {parts.DEVICE_FAILED}"
    assert parts.run_part("part9", [parts.Step("a", 60, ("bash", "-c", script))], tmp_path, 60)
    assert count.read_text() == "x\n" * 3


def test_a_bundle_can_be_carried(load: Any, bundle: Path) -> None:
    made = load("gpu_bundle")
    total = made.check_size(bundle) + sum(WHEELS.values()) + 6 * KERNEL_BYTES
    assert total < made.LIMIT == 64 * 2**20
    assert not [name for name in ("docs", "examples", "tools") if (bundle / name).exists()]
    assert list((bundle / "emssd" / "data" / "demo" / "weights").rglob("*.safetensors")), (
        "the check of the ledger decodes with it"
    )
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?\n", (bundle / "COMMIT").read_text())


def dry_run(root: Path, part: str, results: Path, work: Path) -> subprocess.CompletedProcess[str]:
    """`gpu_run.sh` on the CPU. The packages of the project must come from `root` itself."""
    variables = {"EMSSD_DRY_RUN": "1", "EMSSD_WORK": str(work), "PYTHON": sys.executable, "PYTHONPATH": ""}
    command = ["bash", str(root / "benchmarks" / "gpu_run.sh"), part, str(results)]
    return subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.benchmark
def test_without_a_gpu_only_a_dry_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ended = subprocess.run(
        ["bash", str(BENCHMARKS / "gpu_run.sh"), "1", str(tmp_path / "results")], capture_output=True, text=True,
        env=os.environ | {"EMSSD_WORK": str(tmp_path / "work"), "PYTHON": sys.executable, "EMSSD_DRY_RUN": ""},
    )  # fmt: skip
    assert ended.returncode == 1
    assert "it needs an NVIDIA GPU" in ended.stdout
    assert not list((tmp_path / "results").glob("*.json"))


@pytest.mark.benchmark
@pytest.mark.parametrize("part", ["1", *(pytest.param(part, marks=pytest.mark.dry_run) for part in "23")])
def test_a_dry_run_leaves_the_files_of_each_part(part: str, bundle: Path, tmp_path: Path) -> None:
    """Runs a bundle, so that nothing is missing in it."""
    results, (usual, tests) = tmp_path / "results", ({"log", "json"}, {"1"})
    ended = dry_run(bundle, part, results, tmp_path / "work")
    assert ended.returncode == 0, ended.stdout
    assert f"part{part}-gpu.json" in {file.name for file in results.iterdir()}
    assert (results / f"part{part}-tests.xml").exists() == (part in tests)
    assert usual == {file.suffix[1:] for file in results.glob(f"part{part}.*")}
    rows = json.loads((results / f"part{part}.json").read_text())
    assert {row["ended"].partition(":")[0] for row in rows} <= {"well", "skipped"}
    pieces = json.loads((results / f"part{part}-gpu.json").read_text())["pieces"]
    assert pieces
    assert not [name for name, row in pieces.items() if "failed" in row]
    assert (bundle / "COMMIT").read_text() in (results / f"part{part}.log").read_text()
