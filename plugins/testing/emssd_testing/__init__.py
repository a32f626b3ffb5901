"""Tests for plugin authors: conformance suites, state machines, tiny models and oracles.

    from emssd_testing import DrafterConformance

    class TestMine(DrafterConformance):
        plugin = "mine"

The rules that a suite tests are in docs/reference: what each demands, why, and how to mend it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emssd_testing.conformance.backend import AttentionBackendConformance
    from emssd_testing.conformance.budget import BudgetPolicyConformance
    from emssd_testing.conformance.drafter import DrafterConformance
    from emssd_testing.models import tiny_model
    from emssd_testing.oracle import DenseBackend, greedy_reference

__all__ = [
    "AttentionBackendConformance",
    "BudgetPolicyConformance",
    "DenseBackend",
    "DrafterConformance",
    "greedy_reference",
    "tiny_model",
]

_HOMES = {
    "AttentionBackendConformance": "conformance.backend",
    "BudgetPolicyConformance": "conformance.budget",
    "DenseBackend": "oracle",
    "DrafterConformance": "conformance.drafter",
    "greedy_reference": "oracle",
    "tiny_model": "models",
}


def __getattr__(name: str) -> Any:
    """Import pytest, Hypothesis and torch only when something that needs them is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
