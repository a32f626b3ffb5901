"""No first-party plugin is forgotten in the four places of pyproject.toml that name it; other settings find it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = sorted(path for path in ROOT.glob("plugins/*") if path.is_dir() and not path.name.startswith((".", "_")))
NAMES = [f"emssd_{path.name}" for path in PACKAGES]
# One that has no hook yet cannot be chosen, and nobody gets it.
OFFERED = [
    path
    for path in PACKAGES
    if "@hookimpl" in (path / f"emssd_{path.name}" / "__init__.py").read_text(encoding="utf-8")
]


def test_every_plugin_is_one_package_named_after_its_folder() -> None:
    found = {path.name: sorted(package.name for package in path.glob("emssd_*")) for path in PACKAGES}
    assert found == {path.name: [name] for path, name in zip(PACKAGES, NAMES, strict=True)}
    assert len(NAMES) >= 12


def test_every_plugin_that_offers_something_has_an_entry_point() -> None:
    points = PROJECT["project"]["entry-points"]["emssd"]
    named = {path.name.removesuffix("_draft"): f"emssd_{path.name}" for path in OFFERED}  # `self` is no good folder
    assert points == {"builtin": "emssd.plugins.builtin"} | named
    assert len(OFFERED) >= 12


def test_the_wheel_holds_every_plugin_that_offers_something() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["emssd", "emssd_train", *(f"plugins/{path.name}/emssd_{path.name}" for path in OFFERED)]


def test_walls_stand_around_every_plugin() -> None:
    linter = PROJECT["tool"]["importlinter"]
    assert linter["root_packages"] == ["emssd", "emssd_train", *NAMES]
    assert [" | ".join(NAMES), "emssd"] in [
        contract["layers"] for contract in linter["contracts"] if "layers" in contract
    ]
