"""The pages of rules and the rules are the same set, and every failure points at a paragraph that is there."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from emssd_testing.conformance.rules import RULES, BrokenRule, broken_rule, rules_of
from emssd_testing.oracle import DenseBackend
from omegaconf import MISSING

from plugins.testing.tests import test_backend_conformance, test_budget_conformance, test_planted_drafter_faults
from plugins.testing.tests.conftest import SUITES, Config, Verdicts, broken, suite

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", SUITES)
def test_each_rule_has_its_paragraph_in_the_order_of_reports(kind: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{kind}_rules.md").read_text(encoding="utf-8")
    headings = re.findall(r'^<a id="(.+)"></a>\n## (.+)\n\n(\S)', page, re.MULTILINE)
    expected = [(rule.page.partition("#")[2], rule.name) for rule in rules_of(kind)]
    assert [(anchor, name) for anchor, name, _ in headings] == expected
    assert " ".join(page.split()).count("To fix it:") == len(expected), "each paragraph ends with what to do"
    assert page.count("\n## ") == len(expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_failure_says_which_rule_it_was_and_where_it_is_explained(rule: str) -> None:
    lines = str(BrokenRule(rule, "it did this")).splitlines()
    assert lines[0] == f"{rule}: it did this"
    assert lines[1] == f"  The rule: {RULES[rule].demand}."
    path, _, anchor = lines[2].removeprefix("  See ").partition("#")
    assert f'<a id="{anchor}"></a>' in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", SUITES)
def test_every_rule_is_tested_by_the_suite_and_no_other_is(kind: str) -> None:
    conformance, _ = SUITES[kind]
    named = {rule for rules in conformance.rules_by_test().values() for rule in rules}
    assert named == {rule.name for rule in rules_of(kind)}


def test_a_broken_rule_is_found_behind_other_errors_also_where_causes_go_round() -> None:
    first, second, rule = ValueError(), KeyError(), BrokenRule("drafter.pickle", "it did this")
    first.__cause__, second.__context__ = second, rule
    assert broken_rule(first) is rule
    assert broken_rule(BaseExceptionGroup("several", [ValueError(), first])) is rule
    second.__cause__ = first
    assert broken_rule(first) is None


GOOD: dict[str, Any] = {
    "drafter": (test_planted_drafter_faults.FAULTS, test_planted_drafter_faults.Good),
    "backend": (test_backend_conformance.FAULTS, DenseBackend),
    "budget": (test_budget_conformance.FAULTS, test_budget_conformance.Good),
}


@dataclass
class Locked(Config):
    lock: Any = field(default_factory=threading.Lock)


@dataclass
class Odd(Config):
    value: object = Config


@dataclass
class Named(Config):
    name: str = "x"


@dataclass
class Needs(Config):
    path: str = MISSING


def local_config() -> type:
    @dataclass
    class Local(Config):
        pass

    return Local


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize(("rule", "config"), [("pickle", local_config()), ("options", Odd), ("options", Named)])
@pytest.mark.costly("holds a plugin to every rule")
def test_options_that_cannot_travel_are_found(kind: str, rule: str, config: type, verdicts: Verdicts) -> None:
    assert broken(verdicts(suite(kind, GOOD[kind][1], config=config))) == {f"{kind}.{rule}"}


def test_an_option_without_a_default_is_named() -> None:
    with pytest.raises(BrokenRule, match=r"Needs\.path has no default and is not given; give it, as in path=VALUE"):
        suite("drafter", GOOD["drafter"][1], config=Needs)().make_config()


@pytest.mark.parametrize("full_causes", ["0", "1"])  # as a debugger or coverage makes OmegaConf set them
def test_a_lock_among_the_options_breaks_both_rules(
    full_causes: str, monkeypatch: pytest.MonkeyPatch, verdicts: Verdicts
) -> None:
    monkeypatch.setenv("OC_CAUSE", full_causes)
    assert set(verdicts(suite("drafter", GOOD["drafter"][1], config=Locked)).values()) == {
        "drafter.pickle",
        "drafter.options",
    }


@pytest.mark.parametrize("kind", GOOD)
def test_every_rule_has_a_fault(kind: str) -> None:
    planted = {rule for rule, _ in GOOD[kind][0].values()} | {f"{kind}.pickle", f"{kind}.options"}
    assert planted == {rule.name for rule in rules_of(kind)}
