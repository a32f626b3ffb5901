"""The pytest plugin of emssd: options and markers of the conformance suites, and what they report.

It imports nothing heavy, and does nothing in a session that runs none of the suites.
"""

from __future__ import annotations

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The cost of drafting, for each suite that ran."""
    ended = terminalreporter.stats.get("", [])
    costs = [(report.nodeid, text) for report in ended for name, text in report.user_properties if name == "emssd_cost"]
    if costs:
        terminalreporter.section("cost of drafting (not judged)")
        for nodeid, cost in costs:
            terminalreporter.write_line(f"{nodeid.rpartition('::')[0]}: {cost}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number
