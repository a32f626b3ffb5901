"""Without the libraries of the extra `lab`: what needs them says so, and everything else runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import looped

BLOCKED = """
import runpy, sys
for name in ("pandas", "jinja2", "matplotlib", "accelerate"):
    sys.modules[name] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
LITTLE = ["data.limit=1", "max_new_tokens=2", "progress=false", "output_dir=out"]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *command], cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.costly("a process of its own")
def test_a_sweep_needs_none_of_them(tmp_path: Path) -> None:
    done = run(tmp_path, "emssd", "-m", "drafter=none,llma", *LITTLE)
    assert done.returncode == 0, done.stderr
    assert "the runs of this sweep" in done.stdout


@pytest.mark.costly("a process of its own")
@looped(
    "command, error",
    [
        (["emssd", "-m", "experiment=fig1", "size=toy", *LITTLE], "emssd: error: experiment=fig1 needs pandas"),
        (["emssd_lab.report", "."], "emssd_lab.report: error: a report needs jinja2"),
    ],
)
def test_the_rest_names_the_extra(command: list[str], error: str, tmp_path: Path) -> None:
    done = run(tmp_path, *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error)
    assert done.stderr.endswith('install it: pip install "emssd[lab]"\n')
