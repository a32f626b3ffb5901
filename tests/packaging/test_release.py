"""The files of a release agree with the package; all places of pyproject.toml that name plugins name each."""

from __future__ import annotations

import importlib
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
    project = PROJECT["project"]
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


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = sorted(path for path in ROOT.glob("plugins/*") if path.is_dir() and not path.name.startswith((".", "_")))
NAMES = [f"emssd_{path.name}" for path in PACKAGES]
HOOK = re.compile(r"^(@hookimpl|emssd_\w+ = )", re.MULTILINE)
PARTS = [path.parent for path in ROOT.glob("plugins/*/emssd_*/*/__init__.py") if HOOK.search(path.read_text("utf-8"))]
KITS = ("heads", "lab", "testing")  # of which parts are offered
# One that has no hook yet cannot be chosen, and nobody gets it.
OFFERED = [path for path in PACKAGES if HOOK.search((path / f"emssd_{path.name}" / "__init__.py").read_text("utf-8"))]


def test_every_plugin_is_one_package_named_after_its_folder() -> None:
    found = {path.name: sorted(package.name for package in path.glob("emssd_*/")) for path in PACKAGES}
    assert found == {path.name: [name] for path, name in zip(PACKAGES, NAMES, strict=True)}
    assert len(NAMES) >= 12


def test_every_plugin_that_offers_something_has_an_entry_point() -> None:
    points = PROJECT["project"]["entry-points"]["emssd"]
    named = {path.name.removesuffix("_draft"): f"emssd_{path.name}" for path in OFFERED}  # `self` is no good folder
    parts = {path.name: ".".join(path.parts[-2:]) for path in PARTS}
    core = {"builtin": "emssd.hooks.builtin", "openai_batch": "emssd.integrations.openai_batch"}
    assert points == core | named | parts
    assert len(OFFERED) >= 12


def test_the_wheel_holds_every_plugin_that_offers_something() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == [
        "emssd",
        *(f"plugins/{path.name}/emssd_{path.name}" for path in PACKAGES if path in OFFERED or path.name in KITS),
    ]


def test_walls_stand_around_every_plugin() -> None:
    linter = PROJECT["tool"]["importlinter"]
    assert linter["root_packages"] == ["emssd", *NAMES]
    layers = [contract["layers"] for contract in linter["contracts"] if "layers" in contract]
    rest = [name for name in NAMES if name not in ("emssd_lab", "emssd_testing", "emssd_residual")]
    assert ["emssd_lab", "emssd_testing", " | ".join(rest), "emssd_residual", "emssd"] in layers


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("emssd.drafters", "emssd.draft_models, and emssd_heads"),
        ("emssd.plugins", "emssd.hooks"),
        ("emssd.report", "emssd_lab.report"),
        ("emssd.simulate", "drafter=auto and budget=adaptive"),
        ("emssd.testing", "emssd_testing"),
        ("emssd_train", "emssd_heads.training"),
    ],
)
def test_an_old_place_says_where_its_names_went(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=rf"{old} is .*{new}"):
        importlib.import_module(old)
