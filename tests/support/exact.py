"""Runs code that takes uniform numbers once for every way that they can fall, and adds up exact probabilities.

`Uniform` is an interval of [0, 1). Where a comparison is not decided by what is known of it, it is cut in two, and the
code runs again for the other part. So the code under test draws, compares and branches as it does in production, on
fractions in the place of floats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from emssd_residual.rules import Verdict

from tests.support.drawing import SampledTree, way

Law = dict[Any, Fraction]
Rule = Callable[..., Verdict]
_T = TypeVar("_T", bound=Hashable)


class _Script:
    """The decisions of one run: those that are given, and then always the first."""

    def __init__(self, decided: list[bool]) -> None:
        self.taken, self._given, self.weight = list[bool](), decided, Fraction(1)

    def decide(self) -> bool:
        index = len(self.taken)
        self.taken.append(self._given[index] if index < len(self._given) else True)
        return self.taken[-1]


class Uniform:
    """A uniform number of which is known that it lies in ``[low, high)``."""

    def __init__(self, script: _Script) -> None:
        self._script, self._low, self._high = script, Fraction(0), Fraction(1)

    def __lt__(self, bound: Any) -> bool:
        if bound <= self._low:
            return False
        if bound >= self._high:
            return True
        below, length = self._script.decide(), self._high - self._low
        if below:
            self._high = Fraction(bound)
        else:
            self._low = Fraction(bound)
        self._script.weight *= (self._high - self._low) / length
        return below

    def __ge__(self, bound: Any) -> bool:
        return not self < bound


class TensorUniform(Uniform):
    """The same, to be compared with tensors of floats."""

    def __ge__(self, bound: Any) -> Any:
        if isinstance(bound, torch.Tensor):
            return torch.tensor([super(TensorUniform, self).__ge__(value) for value in bound.tolist()])
        return super().__ge__(bound)


def law_of(run: Callable[[Callable[[], Uniform]], _T], number: type[Uniform] = Uniform) -> dict[_T, Fraction]:
    """The probability of everything that `run` returns, given a source of uniform numbers."""
    chances: dict[_T, Fraction] = defaultdict(Fraction)
    decided: list[bool] = []
    while True:
        script = _Script(decided)
        outcome = run(lambda: number(script))  # noqa: B023 - it is called before the loop goes on
        chances[outcome] += script.weight
        decided = script.taken
        while decided and not decided[-1]:
            decided.pop()
        if not decided:
            assert sum(chances.values()) == 1
            return dict(chances)
        decided[-1] = False


def add_up(parts: Iterable[tuple[Fraction, Law]]) -> Law:
    """The mixture of laws, each with its weight."""
    total: Law = defaultdict(Fraction)
    for weight, law in parts:
        for outcome, chance in law.items():
            total[outcome] += weight * chance
    return {outcome: chance for outcome, chance in total.items() if chance}


def probabilities(*parts: int) -> Any:
    """``[vocab]`` fractions in proportion to `parts`."""
    return np.array([Fraction(part, sum(parts)) for part in parts], dtype=object)


@dataclass(frozen=True, eq=False)
class Model:
    """The tokens after each text of up to two tokens; beyond that, and where nothing is told, `rest`."""

    rest: Any
    told: dict[tuple[int, ...], Any]

    def __call__(self, text: Seq[int]) -> Any:
        return self.told.get(tuple(text), self.rest)


def behind(model: Model) -> Callable[[SampledTree, Seq[int]], list[Any]]:
    """`model` as what draws trees asks it."""
    return lambda tree, nodes: [model(way(tree, node)) for node in nodes]


def texts(tree: SampledTree) -> list[tuple[int, ...]]:
    """``[1 + n]`` the text at the origin and at each node."""
    return [way(tree, node) for node in range(-1, len(tree.token_ids))]


def emitted(rule: Rule, tree: SampledTree, target: Model, draft: Model) -> Law:
    """The law of the texts that a step emits, for this tree."""
    places = texts(tree)
    rows, drawn_from = [np.stack([model(text) for text in places]) for model in (target, draft)]

    def step(uniform: Callable[[], Uniform]) -> tuple[int, ...]:
        verdict: Verdict = rule(rows, drawn_from, tree.token_ids, tree.parents, uniform)
        return (*(tree.token_ids[node] for node in verdict.path), verdict.token)

    return law_of(step)


def continued(law: Law, target: Model, length: int, num_tokens: int = 3) -> Law:
    """The law of the first `length` tokens, where the target itself goes on after what `law` emits."""

    def chance_of(text: tuple[int, ...], begun: int) -> Fraction:
        chance = Fraction(1)
        for index in range(begun, length):
            chance *= target(text[:index])[text[index]]
        return chance

    chances: Law = {}
    for text in product(range(num_tokens), repeat=length):
        chance = sum(
            (weight * chance_of(text, len(out)) for out, weight in law.items() if text[: len(out)] == out), Fraction(0)
        )
        if chance:
            chances[text] = chance
    return chances


def target_law(target: Model, length: int) -> Law:
    """The law of the target's own first `length` tokens."""
    return continued({(): Fraction(1)}, target, length)
