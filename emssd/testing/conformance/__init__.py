"""Conformance suites for plugins: inherit one in a test file, and each rule of the interface is tested.

    from emssd.testing.conformance import DrafterConformance

    class TestMine(DrafterConformance):
        plugin = "mine"

`emssd.testing.conformance.rules` holds the rules, docs/reference what each demands, why, and how to mend it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emssd.testing.conformance.backend import AttentionBackendConformance
    from emssd.testing.conformance.budget import BudgetPolicyConformance
    from emssd.testing.conformance.drafter import DrafterConformance

__all__ = ["AttentionBackendConformance", "BudgetPolicyConformance", "DrafterConformance"]

_HOMES = {
    "AttentionBackendConformance": "backend",
    "BudgetPolicyConformance": "budget",
    "DrafterConformance": "drafter",
}


def __getattr__(name: str) -> Any:
    """Import pytest, Hypothesis and torch only when a suite is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
