"""Some budget policies trim by which tokens were drafted. With `residual` sampling none may.

A policy never reads the ids. But a drafter's confidence in a token is the probability of that token: it tells which
token was drawn. A policy that trims by it keeps likely tokens, and the law of the output is no longer the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd.plugins.registry import Registry
from emssd.sequences import Request
from emssd.testing.conformance.policy_world import DRAFTS, Drafts, PolicyWorld, WatchedPolicy
from emssd.testing.conformance.scripted import Decision, Life
from emssd.testing.drafters import ScriptedBudget

TRIMS_BY_CONFIDENCE = {"adaptive"}
"""These see which token was drawn if they see its confidence; `residual` may not show it to them."""

SEEDS = range(12)


@cache
def installed() -> dict[str, Callable[[], BudgetPolicy]]:
    specs = Registry().specs("budget")
    return {spec.name: lambda spec=spec: spec.build(spec.config()) for spec in specs}  # type: ignore[misc]


def policies() -> list[str]:
    return sorted({"adaptive", "fixed", *installed()})


class Asked(BudgetPolicy):
    """Asks a policy, and a copy of it, which is shown another draft: how often do they trim to other lengths?

    Args:
        policy: to ask.
        shown: what the copy is shown in place of a draft.
    """

    def __init__(self, policy: BudgetPolicy, shown: Callable[[Draft], Draft]) -> None:
        self.policy, self.max_depth, self._shown = policy, policy.max_depth, shown
        self.num_asked = self.num_different = 0

    def allot(self, step: BudgetStep) -> Seq[int]:
        return self.policy.allot(step)

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        other = list(deepcopy(self.policy).trim(step, self._shown(draft)))
        lengths = list(self.policy.trim(step, draft))
        self.num_asked += any(draft.lengths)
        self.num_different += other != lengths
        return lengths

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self.policy.observe(outcome, stats)


def lives(seed: int) -> Iterator[Life]:
    draw = Random(seed)
    for name in "abc":
        script = tuple(
            Decision(9, draw.randint(1, 9), draw.randint(0, 4), draw.randrange(7), draw.randrange(8)) for _ in range(5)
        )
        yield Life(Request(name, (1, 2), 60), script)


def asked(make: Callable[[], BudgetPolicy], drafts: Drafts, shown: Callable[[Draft], Draft]) -> Asked:
    """After some lives with drafts of a kind; the counts are of all of them."""
    total = Asked(make(), shown)
    for seed in SEEDS:
        one = Asked(make(), shown)
        PolicyWorld(WatchedPolicy(one), 1, drafts).live([*lives(seed)])
        total.num_asked += one.num_asked
        total.num_different += one.num_different
    assert total.num_asked > 50
    return total


def other_ids(draft: Draft) -> Draft:
    """The same, where each token is the next one of the vocabulary."""
    return replace(draft, token_ids=(draft.token_ids + 1) % 7)


def other_confidence(draft: Draft) -> Draft:
    """The same, had other tokens been drawn: their probabilities are others."""
    assert draft.confidence is not None
    return replace(other_ids(draft), confidence=tuple(1 - each for each in draft.confidence))


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", policies())
def test_no_policy_trims_by_the_ids(name: str, drafts: Drafts) -> None:
    assert asked(installed()[name], drafts, other_ids).num_different == 0


@pytest.mark.parametrize("name", policies())
def test_it_is_known_which_policies_trim_by_confidence(name: str) -> None:
    differs = asked(installed()[name], "confident trees", other_confidence).num_different > 0
    assert differs == (name in TRIMS_BY_CONFIDENCE)


class ByToken(ScriptedBudget):
    """Drops all from the first token 1 on."""

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        rows = [
            draft.token_ids[start:stop].tolist() for start, stop in zip(draft.indptr, draft.indptr[1:], strict=False)
        ]
        return [row.index(1) if 1 in row else len(row) for row in rows]
