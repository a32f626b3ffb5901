"""Options that cannot travel break a rule of every kind of plugin; and each rule has a fault that breaks it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import MISSING

from emssd.testing.conformance.rules import BrokenRule, rules_of
from emssd.testing.conformance.suite import Suite
from emssd.testing.oracle import DenseBackend
from tests.testing import test_backend_conformance, test_budget_conformance, test_planted_drafter_faults
from tests.testing.conftest import Config, Verdicts, broken

GOOD: dict[str, Any] = {
    "drafter": (test_planted_drafter_faults, test_planted_drafter_faults.Good),
    "backend": (test_backend_conformance, DenseBackend),
    "budget": (test_budget_conformance, test_budget_conformance.Good),
}


def suite(kind: str, config: type) -> type[Suite]:
    module, make = GOOD[kind]
    made: type[Suite] = module.suite(make, config=config)
    return made


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
    assert broken(verdicts(suite(kind, config))) == {f"{kind}.{rule}"}


def test_an_option_without_a_default_is_named() -> None:
    with pytest.raises(BrokenRule, match=r"Needs\.path has no default and is not given; give it, as in path=VALUE"):
        suite("drafter", Needs)().make_config()


@pytest.mark.parametrize("full_causes", ["0", "1"])  # as a debugger or coverage makes OmegaConf set them
def test_a_lock_among_the_options_breaks_both_rules(
    full_causes: str, monkeypatch: pytest.MonkeyPatch, verdicts: Verdicts
) -> None:
    monkeypatch.setenv("OC_CAUSE", full_causes)
    assert set(verdicts(suite("drafter", Locked)).values()) == {"drafter.pickle", "drafter.options"}


@pytest.mark.parametrize("kind", GOOD)
def test_every_rule_has_a_fault(kind: str) -> None:
    planted = {rule for rule, _ in GOOD[kind][0].FAULTS.values()} | {f"{kind}.pickle", f"{kind}.options"}
    assert planted == {rule.name for rule in rules_of(kind)}
