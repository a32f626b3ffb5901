"""Runs a conformance suite by hand, to see which rules it finds broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, settings

from emssd.testing.conformance.rules import broken_rule
from emssd.testing.conformance.suite import Suite


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Callable[..., dict[str, str]]]:
    """``verdicts(suite, rule)``: what each test of a suite says; faults are found and named, not made small."""
    settings.register_profile("before", settings.default)
    settings.register_profile("without_shrinking", settings.default, phases=[Phase.generate], database=None)
    settings.load_profile("without_shrinking")
    yield _verdicts
    settings.load_profile("before")


def _verdicts(tests: type[Suite], rule: str = "") -> dict[str, str]:
    """By test the rule that is broken, or why it was skipped, if it was. Tests of `rule` draw all their examples."""
    found = {}
    for name in sorted(name for name in dir(tests) if name.startswith("test_")):
        chosen, marks = tests(), getattr(getattr(tests, name), "pytestmark", [])
        chosen.num_examples = None if rule in [word for mark in marks for word in mark.args] else 2
        arguments = [lambda *_: None] if name == "test_report_of_the_cost" else []
        try:
            getattr(chosen, name)(*arguments)
        except pytest.skip.Exception as skipped:
            found[name] = f"skipped: {skipped}"
        except Exception as error:
            if (broken := broken_rule(error)) is None:
                raise
            found[name] = broken.rule
    return found
