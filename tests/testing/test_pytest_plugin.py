"""The pytest plugin: its options and markers work, and sessions that do not use it are left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from emssd.testing import pytest_plugin

SUITE = """
from emssd.testing import DrafterConformance

class TestNone(DrafterConformance):
    plugin = "none"
    seen = []

    def make_drafter(self, context):
        self.seen.append((self.num_examples, self.models))
        return super().make_drafter(context)

def test_what_was_asked_for():
    assert set(TestNone.seen) == {(2, ("gemma2",))}
"""


ALONE = ["-q", "--strict-markers", "-p", "no:cacheprovider"]


def run(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", *ALONE, *arguments]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True)


def test_options_reach_the_suite_and_the_cost_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    path = tmp_path / "test_of_options.py"
    path.write_text(SUITE)
    options = ["--emssd-examples=2", "--emssd-models=gemma2", "-k", "cost or asked", "--capture=no", "--noconftest"]
    status = pytest.main([str(path), f"--rootdir={tmp_path}", *ALONE, *options], plugins=[pytest_plugin])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "cost of drafting (not judged)" in printed
    assert "test_of_options.py::TestNone: it drafted nothing" in printed


@pytest.mark.costly("starts processes")
def test_a_session_without_a_suite_imports_nothing_heavy(tmp_path: Path) -> None:
    source = (
        "import sys\ndef test_it():\n    assert not {'torch', 'transformers', 'emssd.decoding'} & set(sys.modules)\n"
    )
    done = run(tmp_path, source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cost of drafting" not in done.stdout
    refused = run(tmp_path, source, "--emssd-examples=0")
    assert refused.returncode == 4
    assert "--emssd-examples" in refused.stderr
