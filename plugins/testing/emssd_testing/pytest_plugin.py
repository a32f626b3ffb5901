"""The pytest plugin of emssd: options and markers of the conformance suites, and what they report.

It imports nothing heavy, and does nothing in a session that runs none of the suites.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suites."""
    group = parser.getgroup("emssd", "conformance suites of emssd")
    group.addoption(
        "--emssd-examples",
        type=_positive,
        metavar="N",
        help="how many examples Hypothesis draws for each test of a conformance suite",
    )
    group.addoption(
        "--emssd-models",
        metavar="NAMES",
        help="architectures of the tiny models that conformance suites decode with, as in llama,gemma2, or folders",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Markers of the suites."""
    config.addinivalue_line("markers", "emssd_rule(*names): rules of the interface that a test holds a plugin to")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Note the tested rules in the report, and the broken one."""
    report = yield
    markers = list(item.iter_markers("emssd_rule"))
    if markers and report.when == "call":
        kind = getattr(getattr(item, "cls", None), "kind", "")  # the tests of options are those of all kinds
        names = [name if "." in name else f"{kind}.{name}" for marker in markers for name in marker.args]
        report.user_properties.append(("emssd_rules", " ".join(names)))
        if call.excinfo is not None:
            from emssd_testing.conformance.rules import broken_rule

            if (error := broken_rule(call.excinfo.value)) is not None:
                report.user_properties.append(("emssd_broken", error.rule))
                report.user_properties.append(("emssd_message", error.message))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The cost of drafting, for each suite that ran."""
    passed = terminalreporter.stats.get("passed", [])
    costs = [(report.nodeid, dict(report.user_properties)["emssd_cost"]) for report in passed
             if "emssd_cost" in dict(report.user_properties)]  # fmt: skip
    if costs:
        terminalreporter.section("cost of drafting (not judged)")
        for nodeid, cost in costs:
            terminalreporter.write_line(f"{nodeid.rpartition('::')[0]}: {cost}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number
