"""Every command in the documentation is parsed or composed, and every piece of Python is a file that a test runs."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import hydra
import pytest
from emssd_heads.training.cli import make_parser as train_parser
from emssd_lab.report.__main__ import make_parser as report_parser
from emssd_rest.cli import make_parser as rest_parser
from emssd_testing.authoring import make_parser as plugins_parser
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import OmegaConf

from emssd.cli.config import DecodeConfig, conf_dir, register_configs
from emssd.hooks.registry import Registry
from tests.support.tiers import looped

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "plugins"
# Reports in docs/results hold commands as they were run.
WRITTEN = [path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts]
PAGES = sorted([*ROOT.glob("*.md"), *WRITTEN, *EXAMPLES.glob("*/README.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "emssd-plugins": plugins_parser,
    "python -m emssd_testing.authoring": plugins_parser,
    "python -m emssd_lab.report": report_parser,
    "emssd-rest": rest_parser,
    "emssd-train": train_parser,
}
SHELL = {".", "cd", "curl", "emssd-lm-eval", "export", "git", "mypy", "pip", "pre-commit", "pytest", "python3", "ruff"}
MODULES = {"python -m build", "python -m benchmarks.demo", "python -m benchmarks.demo.head", "python -m pip"}
PLUGINS = {  # by folder: the kind and the hook of what it offers, and the module of that
    "bigram": ("drafter", "drafters", "drafter"),
    "per_row": ("backend", "attention_backends", "backend"),
    "one_more": ("budget", "budget_policies", "policy"),
}
_SCRIPTS = ("library", "sampling", "two_ways", "similar_places", "entropy_budget", "hf_generate", "ray_data",
            "generate_batch", "trl_grpo", "my_drafters", "vllm_generate", "tensor_parallel")  # fmt: skip
QUOTED = {f"examples/{name}.py" for name in _SCRIPTS} | {  # files that a test runs, or nox -s example_plugin
    f"examples/plugins/{name}/{path}.py"
    for name, (_, _, module) in PLUGINS.items()
    for path in (f"emssd_{name}/__init__", f"emssd_{name}/{module}", f"tests/test_{name}")
}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block, and of each indented one."""
    text = page.read_text(encoding="utf-8")
    for fence in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield fence[1], fence[2]
    without = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for indented in re.finditer(r"(?<=\n\n)(?: {4}\S.*\n?)+(?: {4}.*\n?)*", without):
        yield "", indented[0]
    for code in re.finditer(r"`(python -m emssd[^`\n]*)`", without):
        yield "", code[1]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command; of a console, those after a prompt."""
    for language, text in blocks(page):
        if language not in ("", "sh", "console", "text"):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                continue
            line = re.sub(r"\$\w+|\[WHEELS\]", "1", line.strip().removeprefix("$ "))
            command = r"(\.venv/bin/|python |emssd-|nox |benchmarks/)"
            if language in ("sh", "console") or re.match(command, line):
                parts = [shlex.split(part.replace(".venv/bin/", ""), comments=True) for part in line.split(" && ")]
                yield from filter(None, parts)


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    """Hydra's, with the options of the examples beside those of what is installed."""
    Plugins.instance()
    config_store = ConfigStore.instance()
    before, config_store.repo = config_store.repo, deepcopy(config_store.repo)
    registry = Registry()
    register_configs(registry)
    with pytest.MonkeyPatch.context() as patch:
        offered = {f"{name}/emssd_{name}": offer for name, offer in PLUGINS.items()}
        for name, (group, hook, _) in (offered | {"repeat_last/emssd_example_repeat": PLUGINS["bigram"]}).items():
            folder, module = name.split("/")
            patch.syspath_prepend(str(EXAMPLES / folder))
            (spec,) = getattr(__import__(module), f"emssd_{hook}")()
            config_store.store(group=group, name=spec.name, node=OmegaConf.structured(spec.config))
        yield
    config_store.repo = before
    for name in ("example_repeat", *PLUGINS):
        del sys.modules[f"emssd_{name}"]


def test_commands_are_found() -> None:
    words = [" ".join(words) for page in PAGES for words in commands(page)]
    assert len(words) > 60
    for part in ("python -m emssd check=greedy", "python benchmarks/cpu_step.py", "emssd-plugins new", "nox -s peers"):
        assert any(word.startswith(part) for word in words), part


@looped("page", PAGES)
def test_every_command_is_one_that_works(page: Path, store: None) -> None:
    for words in commands(page):
        head = " ".join(words[: 3 if words[:2] == ["python", "-m"] else 1])
        if head == "python -m emssd":
            check_run(words[3:])
        elif head == "torchrun":
            assert words[1] == "--nproc-per-node", words
            assert words[3:5] == ["-m", "emssd"], words
            check_run(words[5:])
        elif words[:2] == ["emssd", "serve"]:
            check_run([word for word in words[2:] if word != "DIR"], "serve")
        elif head in PARSERS:
            check_arguments(PARSERS[head](), words[len(head.split()) :])
        elif head == "nox":
            sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
            arguments = words[2 : words.index("--") if "--" in words else None]
            assert {word.partition("(")[0] for word in arguments} <= set(sessions), words
        elif (script := words[1] if head == "python" else head).startswith(
            ("benchmarks/", "docs/_hooks/", "docs/images/")
        ):
            source = (ROOT / script).read_text()
            if "from common import" in source:
                source += (ROOT / "benchmarks" / "common.py").read_text()
            assert all(word in source for word in words if word.startswith("--")), words
            if script == "benchmarks/compare.py":
                check_compared(words[2:])
        else:
            assert head in SHELL | MODULES, words


def test_a_command_that_does_not_work_is_seen(store: None) -> None:
    for wrong in (["drafter=lama"], ["drafter.copy_lenght=3"], ["-m", "drafter=none,lama"], ["data.template=a: {b}"]):
        with pytest.raises(HydraException):
            check_run(wrong)
    with pytest.raises(AssertionError):
        check_arguments(plugins_parser(), ["new", "drafters", "mine"])


def check_run(arguments: list[str], config: str = "config") -> None:
    """Compose the options of a server, of a run, or of each run of a sweep."""
    overrides = [word for word in arguments if not word.startswith("-") and "…" not in word]
    overrides = [word for word in overrides if not word.startswith(("hydra/launcher=", "hydra.launcher."))]
    (runs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for run in runs:
            assert isinstance(OmegaConf.to_object(hydra.compose(config, run)), DecodeConfig), arguments


def check_compared(arguments: list[str]) -> None:
    """Compose the options of each engine that ``benchmarks/compare.py`` compares."""
    if arguments[:1] == ["--markdown"]:  # files that earlier calls wrote
        return
    common = [word for word in arguments if "=" in word and " " not in word]
    cells = [word for option, word in pairwise(arguments) if option in ("--cell", "--plain")]
    assert common
    assert cells
    for cell in cells:
        check_run([*(word for word in common if word not in cells), *cell.rpartition(": ")[2].split()])


def check_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Parse them; ``--help`` and what is left out are fine."""
    if arguments and "--help" not in arguments:
        try:
            parser.parse_args(arguments)
        except SystemExit as stop:
            raise AssertionError(f"{parser.prog} does not take {arguments}") from stop


@looped("page", [page for page in WRITTEN if page.name != "types.md"])
def test_python_and_toml_in_the_pages_are_of_files_that_a_test_runs(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            assert any(text in (ROOT / quoted).read_text() for quoted in QUOTED), text
        if language == "toml":
            assert any(text in project.read_text() for project in EXAMPLES.glob("*/pyproject.toml")), text
