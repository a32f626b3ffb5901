"""Runs a conformance suite by hand, to see which rules it finds broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from emssd_testing import AttentionBackendConformance, BudgetPolicyConformance, DrafterConformance
from emssd_testing.authoring import QUICK
from emssd_testing.conformance.rules import broken_rule
from emssd_testing.conformance.suite import Suite
from hypothesis import Phase, settings

Verdicts = Callable[..., dict[str, str]]


@dataclass
class Config:
    """Options that can go everywhere."""

    length: int = 4
    words: dict[str, int] = field(default_factory=dict)


def but(base: type, **attributes: Any) -> Any:
    """A class that is `base` but for these attributes: methods, or values."""
    return type(f"{base.__name__}But", (base,), attributes)


def fails(*_: Any) -> Any:
    """For a method that raises."""
    raise KeyError("of its own")


SUITES: dict[str, tuple[type[Suite], str]] = {
    "drafter": (DrafterConformance, "make_drafter"),
    "backend": (AttentionBackendConformance, "make_backend"),
    "budget": (BudgetPolicyConformance, "make_policy"),
}


def suite(kind: str, make: Callable[..., Any], **attributes: Any) -> type[Suite]:
    """The suite of a kind, of a plugin that `make` makes, for a drafter from its context."""
    conformance, method = SUITES[kind]
    made = {method: lambda self, *context: make(*context), "derandomize": True, "config": Config}
    return type("TestPlanted", (conformance,), made | attributes)


def broken(verdicts: dict[str, str]) -> set[str]:
    """The broken rules, without the tests that were skipped."""
    return {verdict for verdict in verdicts.values() if not verdict.startswith("skipped")}


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    """``verdicts(suite, rule)``: what each test of a suite says; faults are found and named, not made small."""
    settings.register_profile("before", settings.default)
    settings.register_profile("without_shrinking", settings.default, phases=[Phase.generate], database=None)
    settings.load_profile("without_shrinking")
    yield _verdicts
    settings.load_profile("before")


def _verdicts(tests: type[Suite], rule: str = "") -> dict[str, str]:
    """By test the rule that is broken, or why it was skipped, if it was. Tests of `rule` draw as many examples as
    a quick check, and others two.
    """
    results = {}
    for name, rules in tests.rules_by_test().items():
        chosen = tests()
        chosen.num_examples = QUICK if rule in rules else 2  # type: ignore[misc]
        try:
            getattr(chosen, name)()
        except pytest.skip.Exception as skipped:
            results[name] = f"skipped: {skipped}"
        except Exception as error:
            if (rule_broken := broken_rule(error)) is None:
                raise
            results[name] = rule_broken.rule
    return results
