"""Plugin authors import from a few public modules: each of their names is documented, and examples keep to them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from emssd.testing.authoring.new import new_plugin

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "plugins"
MOST_NAMES = 155  # decision 45: fewer is better


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes the page of types."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_hooks"))
    return importlib.import_module("types_page")


def imported(source: str) -> Iterator[tuple[str, str | None]]:
    """Module and name of each import of emssd, wherever it stands; no name where a module itself is imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        yield from ((module, name) for module, name in found if module.partition(".")[0] == "emssd")


def sources(folder: Path) -> Iterator[tuple[Path, str]]:
    yield from ((path, path.read_text(encoding="utf-8")) for path in folder.rglob("*.py") if "site" not in path.parts)


# Pages show these files, and no Python of their own: see test_commands.py.
def test_examples_and_what_the_command_writes_import_public_names_only(page: ModuleType, tmp_path: Path) -> None:
    made = [new_plugin(kind, f"made_{kind}", tmp_path / kind) for kind in ("drafter", "budget")]
    found = [(path, each) for folder in (EXAMPLES, *made) for path, text in sources(folder) for each in imported(text)]
    assert {path.name for path, _ in found} >= {"drafter.py", "policy.py", "backend.py", "test_name.py"} - {
        "test_name.py"
    }
    for path, (module, name) in found:
        assert module in page.MODULES, f"{path} imports {module}"
        assert name is None or name in page.public(module), f"{path} imports {name} of {module}"


def test_our_own_plugins_import_public_names_only(page: ModuleType) -> None:
    own = [(path, each) for path, text in sources(ROOT / "plugins") for each in imported(text) if _is_product(path)]
    assert {path.parent.name for path, _ in own} >= {"emssd_none", "emssd_eagle3", "emssd_ragged", "emssd_adaptive"}
    for path, (module, name) in own:
        assert module in page.MODULES, f"{path} imports {module}; import from a public module, or move the code"
        assert name in page.public(module), f"{path} imports {name} of {module}"


def test_the_public_surface_does_not_grow(page: ModuleType) -> None:
    interfaces = {kind.__name__ for kinds in page.CLASSES.values() for kind in kinds}
    assert len(interfaces) <= 50
    assert len({(module, name) for module in page.MODULES for name in page.public(module)}) <= MOST_NAMES


def _is_product(path: Path) -> bool:
    return not {"tests", "build"} & {*path.relative_to(ROOT).parts}


def test_an_import_of_something_else_is_seen() -> None:
    source = "import emssd.metrics.stats, json\ndef f():\n    from emssd.drafting import Draft, rules\n"
    assert list(imported(source)) == [
        ("emssd.metrics.stats", None),
        ("emssd.drafting", "Draft"),
        ("emssd.drafting", "rules"),
    ]


def test_every_public_name_is_there_and_described_on_the_page(page: ModuleType) -> None:
    text = page.page()
    for module in page.MODULES:
        there = importlib.import_module(module)
        assert f"- `{module}`: " in text
        assert sorted(there.__all__) == sorted(set(there.__all__))
        assert set(page.public(module)) <= set(there.__all__)
        for name in page.public(module):
            assert page.said(getattr(there, name), name), f"{module}.{name} says nothing"
            assert re.search(rf"^    - \[?`{name}`(\]\(#{name.lower()}\))?: [`\w]", text, re.MULTILINE), name


def test_what_interfaces_speak_of_is_public(page: ModuleType) -> None:
    """Each class in the signatures of a described class can be imported from a public module."""
    names = {name for module in page.MODULES for name in page.public(module)}
    ours = {
        name
        for kinds in page.CLASSES.values()
        for kind in kinds
        for name, value in vars(sys.modules[kind.__module__]).items()
        if inspect.isclass(value)
        and value.__module__.startswith("emssd.")
        and re.search(rf"\b{name}\b", _annotations(kind))
    }
    assert not ours - names


def _annotations(kind: type) -> str:
    functions = [getattr(member, "__func__", member) for member in vars(kind).values()]
    signatures = [str(inspect.signature(each)) for each in functions if inspect.isfunction(each)]
    return " ".join([*map(str, inspect.get_annotations(kind).values()), *signatures])
