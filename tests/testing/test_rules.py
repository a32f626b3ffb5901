"""The pages of rules and the rules are the same set, and every failure points at a paragraph that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emssd.testing import AttentionBackendConformance, BudgetPolicyConformance, DrafterConformance
from emssd.testing.conformance.rules import RULES, BrokenRule, broken_rule, rules_of
from emssd.testing.conformance.suite import Suite

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["drafter", "backend", "budget"])
def test_each_rule_has_its_paragraph_in_the_order_of_reports(kind: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{kind}_rules.md").read_text(encoding="utf-8")
    found = re.findall(r'^<a id="(.+)"></a>\n## (.+)\n\n(\S)', page, re.MULTILINE)
    expected = [(rule.page.partition("#")[2], rule.name) for rule in rules_of(kind)]
    assert [(anchor, name) for anchor, name, _ in found] == expected
    assert " ".join(page.split()).count("To fix it:") == len(expected), "each paragraph ends with what to do"
    assert page.count("\n## ") == len(expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_failure_says_which_rule_it_was_and_where_it_is_explained(rule: str) -> None:
    lines = str(BrokenRule(rule, "it did this")).splitlines()
    assert lines[0] == f"{rule}: it did this"
    assert lines[1] == f"  The rule: {RULES[rule].demand}."
    path, _, anchor = lines[2].removeprefix("  See ").partition("#")
    assert f'<a id="{anchor}"></a>' in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("suite", [DrafterConformance, AttentionBackendConformance, BudgetPolicyConformance])
def test_every_rule_is_tested_by_the_suite_and_no_other_is(suite: type[Suite]) -> None:
    tests = [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]
    marks = [name for test in tests for mark in getattr(test, "pytestmark", []) for name in mark.args]
    named = {name if "." in name else f"{suite.kind}.{name}" for name in marks}
    assert named == {rule.name for rule in rules_of(suite.kind)}


def test_a_broken_rule_is_found_behind_other_errors_also_where_causes_go_round() -> None:
    first, second, rule = ValueError(), KeyError(), BrokenRule("drafter.pickle", "it did this")
    first.__cause__, second.__context__ = second, rule
    assert broken_rule(first) is rule
    assert broken_rule(BaseExceptionGroup("several", [ValueError(), first])) is rule
    second.__cause__ = first
    assert broken_rule(first) is None
