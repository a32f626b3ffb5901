"""Faults that others had, and some more, put into the code one by one: the exact law shows each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.sampling.cases import DRAFTS, TARGETS, mixed, trees_of
from tests.sampling.exact import Model, continued, probabilities, target_law

PACKAGE = "emssd.sampling.residual"
SAME = Model(probabilities(1, 2, 3), {})
FAR = Model(probabilities(0, 2, 3), {}), Model(probabilities(2, 1, 1), {})
PAIRS = [(SAME, SAME), FAR, *product(TARGETS.values(), DRAFTS.values())]

EXCESS = {
    "residual not renormalised": ("above / mass if mass > 0 else probs", "above"),
    "residual of the wrong sign": ("(alpha * probs - draft)", "(draft - alpha * probs)"),
    "q not renormalised": ("return rest / mass if mass > 0 else rest", "return rest"),
    "drawn token not taken out of q": ("rest[token] = 0", "pass"),
    "one token too far": ("uniform).sum())", "uniform).sum()) + 1"),
}
UPDATE = "alphas[at], left[at] = _after_rejection(alphas[at], left[at], drawable[at])"
PUBLIC = (
    "alphas[at], left[at] = (lambda Z, p: (min(1, Z / (1 - chance)) if chance < 1 else 0, p))"
    "(*excess(alphas[at], left[at], drawable[at]))"
)
ACCEPT = (
    "uniform() < alphas[node + 1]:\n            return Verdict(path(parents, node), choose(left[node + 1], uniform()))"
)
TRAVERSAL = {
    "0/0 where nothing is left": (" if mass > 0 else probs", ""),
    "0/0 where p = q": ("    if alpha == 1:", "    if False:"),
    "alpha of the public code": (UPDATE, PUBLIC),
    "alpha kept after a rejection": ("return mass / (mass + (1 - alpha)), left", "return alpha, left"),
    "alpha without its 1 - alpha": ("return mass / (mass + (1 - alpha)), left", "return mass, left"),
    "alpha forgets the way": ("min(1, alphas[at] * number", "min(1, number"),
    "alpha above 1": (
        "min(1, alphas[at] * number(left[at][token]) / chance)",
        "alphas[at] * number(left[at][token]) / chance",
    ),
    "residual without alpha": ("mass, left = excess(alpha, left", "mass, left = excess(1, left"),
    "q of the wrong row": ("drawable.append(draft[node + 1])", "drawable.append(draft[node])"),
    "p of the wrong row": ("left.append(target[node + 1])", "left.append(target[node])"),
    "last sibling first": ("waiting.extend(children[node + 1])", "waiting.extend(children[node + 1][::-1])"),
    "parents before children": ("found[:0:-1]", "sorted(found[1:])"),
    "last token from p": ("choose(left[node + 1], uniform())", "choose(target[node + 1], uniform())"),
    "last token from p at the origin": ("Verdict([], choose(left[0]", "Verdict([], choose(target[0]"),
    "accepted if not": ("uniform() < alphas[node + 1]", "uniform() >= alphas[node + 1]"),
    "one number for two draws": (
        ACCEPT,
        ACCEPT.replace("uniform() <", "(u := uniform()) <").replace("uniform()))", "u))"),
    ),
}
DETERMINISTIC = {
    "descends to the wrong token": ("token_ids[child] == token]", "token_ids[child] != token]"),
    "p of the origin": ("choose(target[nodes[0] + 1]", "choose(target[0]"),
    "draws again for the last token": (
        "path(parents, nodes[0]), token)",
        "path(parents, nodes[0]), choose(target[nodes[0] + 1], uniform()))",
    ),
}
MUTANTS = [
    *(("verify_traversal", *each) for each in (EXCESS | TRAVERSAL).items()),
    *(("verify_deterministic", *each) for each in DETERMINISTIC.items()),
]


def sources() -> str:
    """What the rules consist of, as one file."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    parts = [Path(spec.origin).with_name(f"{name}.py").read_text() for name in ("distributions", "rules")]
    lines = [
        line for line in "\n".join(parts).splitlines() if not line.startswith(("from __future__", f"from {PACKAGE}"))
    ]
    return "\n".join(["from __future__ import annotations", *lines])


def loaded(source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", module)
    exec(compile(source, "mutant", "exec"), module.__dict__)
    return module


def is_right(rule: Callable[..., Any]) -> bool:
    """Whether the rule gives the target's law in all cases, and does not fail."""
    for (target, draft), shape in product(PAIRS, [(1, 1), (2, 1), (3,)]):
        try:
            law = mixed(rule, trees_of(draft, shape), target, draft)
        except (ArithmeticError, IndexError, AssertionError):
            return False
        length = len(shape) + 1
        if continued(law, target, length) != target_law(target, length):
            return False
    return True


@pytest.mark.parametrize("name", ["verify_traversal", "verify_deterministic"])
def test_without_a_fault_the_cases_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right(getattr(loaded(sources(), monkeypatch), name))


@pytest.mark.parametrize(
    ("name", "fault", "change"), MUTANTS, ids=[f"{name[7:]}-{fault}" for name, fault, _ in MUTANTS]
)
def test_each_fault_shows(name: str, fault: str, change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = change
    source = sources()
    assert before in source
    module = loaded(source.replace(before, after), monkeypatch)
    assert not is_right(getattr(module, name))
