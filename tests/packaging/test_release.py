"""The files of a release agree with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

if not WORKFLOWS:
    pytest.skip("it tests a checkout, and this is a wheel", allow_module_level=True)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert [author["family-names"] for author in citation["references"][0]["authors"]] == [
        "Ni", "Liu", "Tang", "Han", "Wang",
    ]  # fmt: skip


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    lines = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    named = [line.split()[-1] for line in lines if line.startswith("nox -s ")]
    scripts = [line.split()[-1] for line in lines if line.startswith("bash ")]
    assert named or scripts
    assert set(named) <= set(sessions)
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_only_read_and_run_what_is_pinned(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}  # a job that writes says so itself
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(re.search("@[0-9a-f]{40}$", step["uses"]) for step in steps if "uses" in step)
    assert all("-c constraints.txt" in step["run"] for step in steps if "pip install" in step.get("run", ""))


def test_as_a_library_it_shows_no_messages() -> None:
    say = "import logging, emssd; logging.getLogger('emssd').warning('hello')"
    assert not subprocess.run([sys.executable, "-c", say], capture_output=True, check=True).stderr
