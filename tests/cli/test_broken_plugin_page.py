"""docs/how_to/broken_plugin.md: each message on it is what is really printed, and no message is missing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from emssd_testing.models import tiny_model

import emssd
from emssd import Engine
from emssd.cli.config import register_configs
from emssd.errors import EmssdError, PluginError, PluginWarning
from emssd.hooks.hookspecs import unmet_requirement
from emssd.hooks.registry import KINDS, Registry
from tests.support.tiers import looped

from .conftest import drafter, fenced

PAGE = fenced("how_to/broken_plugin.md", "text")
GOOD = drafter(name="mine", options="length: int = 2")


def other(kind: str, method: str) -> tuple[str, str]:
    """A kind, and the source of a plugin of it, whose class has one method."""
    (hook, record), base = KINDS[kind], {"budget": "BudgetPolicy", "backend": "DenseBackend"}[kind]
    return (
        kind,
        f"""
from dataclasses import dataclass
from emssd.drafting import BudgetPolicy
from emssd.hooks import {record.__name__}, hookimpl
from emssd_testing import DenseBackend

@dataclass
class Config:
    length: int = 2

class Mine({base}):
    def {method}

@hookimpl
def {hook}():
    return [{record.__name__}("mine", Config, lambda config: Mine())]
""",
    )


LOADED = {
    "import": "import fast_lookup",
    "raise": "raise RuntimeError('no licence')",
    "misspelt": GOOD.replace("def emssd_drafters", "def emssd_drafter"),
    "argument": GOOD.replace("emssd_drafters()", "emssd_drafters(context)"),
    "exits": "import sys; sys.exit(0)",
    "nothing": "x = 1",
    "none": GOOD.replace("return [DrafterSpec", "[DrafterSpec"),
    "number": GOOD.replace('"mine"', "5"),
    "no list": GOOD.replace("return [DrafterSpec", "return 'mine' # "),
    "other record": GOOD.replace("DrafterSpec", "BudgetSpec"),
    "taken": GOOD.replace('"mine"', '"llma"'),
    "no dataclass": GOOD.replace("@dataclass\n", ""),
    "frozen": GOOD.replace("@dataclass\n", "@dataclass(frozen=True)\n"),
    "name": GOOD.replace("length: int = 2", "name: str = 'x'"),
}

RUNS = {
    "raises": "raise KeyError('lost')",
    "observes": "return Draft.empty(len(batch))\n    def observe(self, outcome): raise KeyError('lost')",
    "no draft": "return [[1]] * len(batch)",
    "int32": "return Draft(Draft.from_chains([[1]]).token_ids.int(), (0, 1))",
    "rows": "return Draft.empty(0)",
    "tree": "return Draft(Draft.from_chains([[1, 2]]).token_ids, (0, 2), parents=(-1, -1))",
    "budget": "return Draft.from_chains([[1, 2, 3]] * len(batch))",
    "vocabulary": "return Draft.from_chains([[-1]] * len(batch))",
    "batch": "batch.rows[0].tokens.append(1); return Draft.empty(len(batch))",
}

ENDS = {
    "builds nothing": ("drafter", GOOD.replace("context: Third()", "context: None")),
    "build exits": ("drafter", GOOD.replace("context: Third()", "context: __import__('sys').exit(0)")),
    "length": ("drafter", GOOD.replace("num_speculative_tokens = 2", "num_speculative_tokens = 2.5")),
    "policy raises": other("budget", "allot(self, step): raise KeyError('lost')"),
    "policy overruns": other("budget", "allot(self, step): return [limit + 1 for limit in step.limits]"),
    "backend cannot": other("backend", "unsupported(self, spec): return ['it has no sliding windows']"),
    "backend raises": other("backend", "plan(self, packed): raise RuntimeError('no kernel')"),
}


def load() -> tuple[Registry, list[str]]:
    """All plugins, and what is warned of; where the module lies differs from machine to machine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = Registry()
    return registry, [re.sub(r"from '.*/", "from '", str(warning.message)) for warning in caught]


def run(**chosen: str) -> str:
    """The messages of a short run with the plugin."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Engine.from_model(tiny_model(), **({"budget": "fixed"} | chosen)).generate([[3, 4, 5]], 6)
        except EmssdError as error:
            return str(error)
        except RuntimeError as error:  # of the plugin's own
            return f"{type(error).__name__}: {error}"
    (message,) = [str(warning.message) for warning in caught]
    return message


@looped("fault", LOADED)
def test_a_plugin_that_cannot_be_loaded(fault: str, install: Callable) -> None:
    install("mine", LOADED[fault])
    registry, (message,) = load()
    assert message in PAGE
    assert {"llma", "none"} <= set(registry.names("drafter")), "the others work"


def test_an_entry_point_that_names_nothing(install: Callable, tmp_path: Path) -> None:
    install("mine", GOOD)
    (tmp_path / "site_mine" / "third_party_mine-1.2.dist-info" / "entry_points.txt").write_text(
        "[emssd]\nmine = third_party_mine:plugin\n"
    )
    assert load()[1][0] in PAGE


@looped("source", [LOADED["raise"], GOOD.replace("Third())]", "Third(), lambda: 'it needs a licence')]")])
def test_one_that_is_chosen_and_failed_or_cannot_run_here(source: str, install: Callable) -> None:
    install("mine", source)
    registry, _ = load()
    with pytest.raises(PluginError) as caught:
        registry.find("drafter", "mine")
    assert str(caught.value).replace(", ".join(registry.names("drafter")), "NAMES") in PAGE


@looped("fault", RUNS, at_a_time=5)
def test_one_that_fails_while_it_runs(fault: str, install: Callable) -> None:
    install("mine", GOOD.replace("return Draft.empty(len(batch))", RUNS[fault]))
    assert run(drafter="mine") in PAGE


@looped("fault", ENDS)
def test_what_ends_the_run(fault: str, install: Callable) -> None:
    kind, source = ENDS[fault]
    install("mine", source)
    assert run(**{kind: "mine"}) in PAGE


def test_options_that_the_command_line_cannot_hold(install: Callable) -> None:
    install("mine", GOOD.replace("length: int = 2", "length: complex = 2j"))
    registry, _ = load()
    with pytest.warns(PluginWarning) as caught:
        register_configs(registry)
    (message,) = [str(warning.message) for warning in caught]
    assert message in PAGE


@looped(
    "line, met",
    [("emssd>=99", False), ("emssd>=0.1,<99", True), ("emssd", True), ("numpy>=99", True), ("???", True),
     ("Emssd>=99; python_version<'3'", True), ("emssd[testing]>=99", False)],
)  # fmt: skip
def test_one_that_was_made_for_another_emssd(line: str, met: bool, install: Callable, tmp_path: Path) -> None:
    install("mine", GOOD)
    metadata = tmp_path / "site_mine" / "third_party_mine-1.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + f"Requires-Dist: {line}\n")
    reason = unmet_requirement("third-party-mine")
    assert (reason is None) == met
    assert met or reason.replace(emssd.__version__, "VERSION") in PAGE  # type: ignore[union-attr]


def test_no_message_of_the_page_is_untested() -> None:
    others = ["entry point", "options", "chosen", "not available", "version"]
    assert len(set(PAGE)) == len(PAGE) == len(LOADED) + len(RUNS) + len(ENDS) + len(others)
