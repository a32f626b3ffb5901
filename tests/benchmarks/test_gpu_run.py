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


@looped("part", range(1, 6))
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
@pytest.mark.parametrize("part", ["4", *(pytest.param(part, marks=pytest.mark.dry_run) for part in "1235")])
def test_a_dry_run_leaves_the_files_of_each_part(part: str, tmp_path: Path) -> None:
    """It goes on after the results that `carried` has from an earlier call."""
    results, carried = tmp_path / "results", tmp_path / "carried"
    (carried / "results").mkdir(parents=True)
    (carried / "results" / f"part{part}-gpu.json").write_text('{"machine": {}, "pieces": {"before": {}}}')
    variables = {"EMSSD_DRY_RUN": "1", "EMSSD_WORK": str(tmp_path / "work"), "PYTHON": sys.executable}
    ended = subprocess.run(
        ["bash", str(BENCHMARKS / "gpu_run.sh"), part, str(results), str(carried)],
        env=os.environ | variables | {"PYTHONPATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert (results / f"part{part}-tests.xml").exists() == (part == "4")
    assert {"log", "json"} == {file.suffix[1:] for file in results.glob(f"part{part}.*")}
    rows = json.loads((results / f"part{part}.json").read_text())
    assert {row["ended"].partition(":")[0] for row in rows} <= {"well", "skipped"}
    pieces = json.loads((results / f"part{part}-gpu.json").read_text())["pieces"]
    assert len(pieces) > 1
    assert next(iter(pieces)) == "before"
    assert not [name for name, row in pieces.items() if "failed" in row]
    decoded = {name: row["equal_rows"] for name, row in pieces.items() if name.startswith("decode")}
    assert all(f"batch={rows} " in name for name, rows in decoded.items()), f"some rows have wrong tokens: {decoded}"
