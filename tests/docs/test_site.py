"""Pages made from docstrings are up to date; pictures and tables are their sources'; examples import public names."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from emssd_lab.experiment.appendix import acceptance_pmf, expected
from emssd_testing.authoring.new import new_plugin

from emssd.cli.config import ExperimentConfig, RunConfig, TaskConfig, conf_dir
from emssd.data.model_options import ModelOptions
from emssd.drafting import Drafter
from emssd.hooks.registry import KINDS, Registry
from tests.support.tiers import looped

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
BIGRAM = ROOT / "examples" / "plugins" / "bigram"


Load = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Load:
    """``module(name)`` imports a hook of the site, or the script of a picture."""
    for folder in (DOCS / "_hooks", DOCS / "images", ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


def places() -> Iterator[tuple[str, str, type]]:
    """The heading and option prefix of each class of options on the page."""
    yield "", "", RunConfig
    for name, kind in (("model", ModelOptions), ("experiment", ExperimentConfig), ("task", TaskConfig)):
        yield f"{name}=…", f"{name}.", kind
    registry = Registry()
    for kind in KINDS:
        for spec in registry.specs(kind):
            if registry.source(kind, spec.name).startswith("emssd "):
                yield f"{kind}={spec.name}", f"{kind}.", spec.config


def test_the_page_of_options_has_every_option_once_with_its_words() -> None:
    page = (REFERENCE / "options.md").read_text(encoding="utf-8")
    parts = {part.partition("\n")[0]: part for part in re.split("^##+ ", page, flags=re.MULTILINE)} | {"": page}
    for heading, prefix, kind in places():
        for field in dataclasses.fields(kind):
            (words,) = re.findall(rf"^- `{prefix}{field.name}` · .*?: (.*)$", parts[heading], re.MULTILINE)
            assert len(words) > 5, (heading, field.name)
    for path in conf_dir().glob("*/*.yaml"):
        assert f"| `{path.parent.name}={path.stem}` | " in page or path.parent.name == "sweep", path


@looped(
    "line",
    [
        "`drafter.search` · `prompt` \\| `prompt_and_output` · default `prompt`: ",
        "`budget.num_tokens` · integer, or `null` · default `null`: ",
        "`data.path` · text · no default: ",
        "`drafter.drafters` · list of text · default `[suffix,self]`: ",
        "`backend.pad_kv` · `true` \\| `false` · default `true`: ",
        "`drafter` · [a choice](#drafter) · default `suffix`: ",
    ],
)
def test_types_and_defaults_are_as_the_user_writes_them(line: str) -> None:
    assert f"\n- {line}" in (REFERENCE / "options.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["options.md", "types.md"])
def test_the_pages_made_from_docstrings_are_up_to_date(name: str, module) -> None:
    page = module("reference").MADE[name]()
    assert (REFERENCE / name).read_text(encoding="utf-8") == page, "run: python docs/_hooks/reference.py"


def test_an_option_without_a_word_about_it_stops_the_build(module) -> None:
    @dataclasses.dataclass
    class Silent:
        """Options.

        Attributes:
            width: of something.
        """

        width: int = 1
        height: int = 1

    with pytest.raises(LookupError, match=r"Silent\.height is not in the Attributes of its docstring"):
        module("options")._options(Silent, dataclasses.fields(Silent))


def test_the_page_of_types_has_every_field_and_method_of_the_interfaces(module) -> None:
    types_page = module("types_page")
    page = (REFERENCE / "types.md").read_text(encoding="utf-8")
    parts = {part.partition("\n")[0]: part for part in page.split("\n### ")}
    for kind in (kind for kinds in types_page.CLASSES.values() for kind in kinds):
        names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else ()
        for name in getattr(kind, "_fields", names):
            assert f"\n- `{name.removeprefix('_')}` · `" in parts[kind.__name__]
    assert "@abstractmethod\ndef propose(self, batch: Batch, budget: Seq[int]) -> Draft\n" in page
    for name in ("observe", "release"):
        assert f"def {name}(self, " in page
        assert getattr(Drafter, name).__doc__.splitlines()[0] in page


def test_links_that_leave_the_docs_become_text_and_dead_ones_are_warned_of(
    module, caplog: pytest.LogCaptureFixture
) -> None:
    rewritten = module("links").rewritten
    text = "[a](../emssd/decoding/engine.py) [b](scheduling.md#x) [c](results) [d](../CHANGELOG.md) ![e](../f.png)"
    with caplog.at_level(logging.WARNING):
        assert rewritten(text, DOCS / "metrics.md", "metrics.md") == (
            "a [b](scheduling.md#x) c [d](changelog.md) ![e](../f.png)"
        )
        assert rewritten("[x](docs/metrics.md)", ROOT / "CONTRIBUTING.md", "contributing.md") == "[x](metrics.md)"
        assert not caplog.records
        rewritten("[a](../emssd/motor.py)", DOCS / "metrics.md", "metrics.md")
    assert [record.getMessage() for record in caplog.records] == [
        "docs/metrics.md links to ../emssd/motor.py, which does not exist"
    ]


@looped("name", ["padding", "tree", "house"])
def test_a_picture_is_what_its_script_draws(name: str, module) -> None:
    assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == module(name).picture()


def test_the_plot_of_the_readme_is_drawn_from_the_figures_beside_it(module) -> None:
    results, plot = DOCS / "results", module("demo_plot")
    drawn = plot.picture([results / "demo_speedup.json"], plot.CELLS, "the embedded demo, float32")
    kept = (results / "demo_speedup.svg").read_text(encoding="utf-8")
    words = [re.findall(r"<text [^>]*>([^<]*)<", picture) for picture in (drawn, kept)]  # lines are matplotlib's matter
    assert words[0] == words[1] != []


def test_the_table_of_padding_is_that_of_the_closed_forms() -> None:
    page = (DOCS / "explanation" / "padding.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (0\.\d) \| (.*) \|$", page, re.MULTILINE)
    assert [float(p) for p, _ in rows] == [0.3, 0.5, 0.7, 0.9]
    for p, cells in rows:
        ratios = [expected(acceptance_pmf(float(p), 8), size).padding_ratio for size in (2, 4, 8, 16, 32)]
        assert cells.split(" | ") == [f"{ratio:.1%}" for ratio in ratios]


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0][0] != "." and "__pycache__" not in path.parts}


def test_the_budget_policy_of_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    made, example = new_plugin("budget", "one_more", tmp_path / "made"), ROOT / "examples" / "plugins" / "one_more"
    assert files(made) == files(example)
    assert all((made / name).read_text() == (example / name).read_text() for name in files(made))


def test_the_tutorials_plugin_is_what_the_command_writes_with_another_drafter(tmp_path: Path) -> None:
    made = new_plugin("drafter", "bigram", tmp_path / "emssd-bigram")
    assert files(made) == files(BIGRAM)
    own = {"README.md", "emssd_bigram/__init__.py", "emssd_bigram/drafter.py", "tests/test_bigram.py"}
    assert all((made / name).read_text() == (BIGRAM / name).read_text() for name in files(made) - own)


EXAMPLES = ROOT / "examples" / "plugins"
MOST_NAMES = 148  # decision 45: fewer is better


@pytest.fixture
def page(module: Load) -> ModuleType:
    """The module that makes the page of types."""
    return module("types_page")


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
    assert {path.name for path, _ in found} >= {"drafter.py", "policy.py", "backend.py"}
    for path, (module, name) in found:
        assert module in page.MODULES, f"{path} imports {module}"
        assert name is None or name in page.public(module), f"{path} imports {name} of {module}"


def test_our_own_plugins_import_public_names_only(page: ModuleType) -> None:
    """All but the rule of verification, which is trusted as the engine is, and the kits beside the engine.

    The families of heads are checked as well; they stand on a kit of their own.
    """
    kits = {"emssd_residual", "emssd_lab", "emssd_testing", "training"}
    used = [
        (path, names)
        for path, text in sources(ROOT / "plugins")
        for names in imported(text)
        if path.parent.name != "emssd_heads" and not (kits | {"tests", "build"}) & {*path.relative_to(ROOT).parts}
    ]
    assert {path.parent.name for path, _ in used} >= {"emssd_none", "emssd_suffix", "emssd_ragged", "eagle3", "mtp"}
    for path, (module, name) in used:
        assert module in page.MODULES, f"{path} imports {module}; import from a public module, or move the code"
        assert name in page.public(module), f"{path} imports {name} of {module}"


def test_the_public_surface_does_not_grow(page: ModuleType) -> None:
    interfaces = {kind.__name__ for kinds in page.CLASSES.values() for kind in kinds}
    assert len(interfaces) <= 50
    assert len({(module, name) for module in page.MODULES for name in page.public(module)}) <= MOST_NAMES


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
