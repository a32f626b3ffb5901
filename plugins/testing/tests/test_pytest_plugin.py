"""`emssd-plugins new KIND NAME` writes a plugin whose own tests, style and types are in order as it is."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from emssd_testing import authoring, pytest_plugin


def run(*command: object, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=cwd, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "module"), [("drafter", "drafter.py"), ("budget", "policy.py")])
def test_it_is_complete_and_in_good_style(
    kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    authoring.main(["new", kind, "my_own2_drafter"])  # its tests and types are run by nox -s new_plugin
    made = tmp_path / "emssd-my-own2-drafter"
    files = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
    package = "emssd_my_own2_drafter"
    assert files == sorted(
        ["README.md", "pyproject.toml", "tests/test_my_own2_drafter.py"]
        + [f"{package}/{name}" for name in ("__init__.py", module, "py.typed")]
    )
    for path in made.rglob("*.*"):
        assert "$" not in path.read_text().replace("$ ", ""), f"{path} has a place that was not filled in"
    run("ruff", "check", ".", cwd=made)
    run("ruff", "format", "--check", ".", cwd=made)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        authoring.main(["new", "drafter", "my_own2_drafter", "--folder", str(tmp_path)])
    assert f"{tmp_path} is there already, and nothing in it is overwritten" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("README.md", "mine")]


@pytest.mark.parametrize("name", ["My_drafter", "my-drafter", "1st", "_mine", "mine_", "class", "é", "", "a b", "a.b"])
def test_a_name_that_cannot_be_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        authoring.main(["new", "drafter", name])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"emssd-plugins: error: {name!r} cannot name a drafter: it becomes a Python package")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(point.name for point in entry_points(group="emssd") if point.name != "data"))
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        authoring.main(["new", "drafter", name, "--folder", str(tmp_path / "new")])
    assert f"{name!r} is taken by emssd 0." in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


SUITE = """
from emssd_testing import DrafterConformance

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


def run_session(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
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
    done = run_session(tmp_path, source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cost of drafting" not in done.stdout
    refused = run_session(tmp_path, source, "--emssd-examples=0")
    assert refused.returncode == 4
    assert "--emssd-examples" in refused.stderr
