"""The suite of drafters finds faults, one for each rule, and names the rule; a good drafter breaks none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.sequences import Batch, Row
from plugins.testing.tests.conftest import Verdicts, but, fails, suite


class Good(Drafter):
    """Drafts what followed the newest token earlier, with a memory of each request. The faults are planted in it."""

    num_speculative_tokens = 4

    def __init__(self, context: DrafterContext) -> None:
        self.vocab_size = context.vocab_size
        self.read: dict[str, list[int]] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(self.chain(row)[:limit] for row, limit in zip(batch, budget, strict=True))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.read.pop(request_id, None)

    def chain(self, row: Row) -> list[int]:
        text = self.read.setdefault(row.request_id, [])
        text += row.tokens[len(text) :]
        before = [index for index, token in enumerate(text[:-1]) if token == text[-1]]
        return text[before[-1] + 1 :] if before else []


class GoodTrees(Good):
    """Drafts all that followed the newest token earlier, as a tree, and how often that was."""

    num_speculative_tokens, drafts_trees = 8, True

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = [self.nodes(row)[:limit] for row, limit in zip(batch, budget, strict=True)]
        trees = Draft.from_trees([(token, parent) for token, parent, _ in row] for row in rows)
        draft = replace(trees, confidence=tuple(share for row in rows for *_, share in row))
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])

    def nodes(self, row: Row) -> list[tuple[int, int, float]]:
        self.chain(row)
        text = self.read[row.request_id]
        starts = [index + 1 for index, token in enumerate(text[:-1]) if token == text[-1]]
        nodes = dict[tuple[int, int], int]()
        for start in starts:
            parent = -1
            for token in text[start : start + 3]:
                parent = nodes.setdefault((token, parent), len(nodes))
        return [(token, parent, 1 / (1 + len(starts))) for token, parent in nodes]


class ReusesItsBuffer(Good):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.draft = super().propose(batch, budget)
        return self.draft

    def observe(self, outcome: Outcome) -> None:
        outcome.draft.token_ids.zero_()


class OneMemoryForAll(Good):
    """Finds what followed the newest token in any request."""

    def chain(self, row: Row) -> list[int]:
        super().chain(row)
        behind = [text[index + 1] for text in self.read.values() for index in range(len(text) - 1)
                  if text[index] == row.tokens[-1]]  # fmt: skip
        return behind[:1]


class CountsOnPlaces(Good):
    """Remembers by row of the batch in the place of the request."""

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        chains = []
        for index, (row, limit) in enumerate(zip(batch, budget, strict=True)):
            text = self.read.setdefault(str(index), [])
            text += row.tokens[len(text) :]
            chains.append([text[0]][:limit])
        return Draft.from_chains(chains)


class MissesUnknownIds(Good):
    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self.read[request_id]


class KeepsWhatIsInTheMiddle(Good):
    """Forgets only requests that reached their limit."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.ended: set[str] = set()

    def observe(self, outcome: Outcome) -> None:
        self.ended |= {row.request_id for row in outcome.batch if row.finish_reason is not None}

    def release(self, request_ids: Iterable[str]) -> None:
        super().release(self.ended & set(request_ids))


class OverwritesLater(Good):
    """Between the calls that can be watched."""

    rows: tuple[Row, ...] = ()

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]
        for row in self.rows:
            list.__setitem__(row.tokens, -1, 0)
        return 4

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.rows = tuple(batch)
        return super().propose(batch, budget)


SHARED = []


def shared(context: DrafterContext) -> Drafter:
    SHARED[:] = SHARED or [Good(context)]
    return SHARED[0]


def proposed(change: Callable[[Draft], Draft], base: type = Good) -> Any:
    """`base`, whose drafts are changed."""
    return but(base, propose=lambda self, batch, budget: change(base.propose(self, batch, budget)))  # type: ignore[attr-defined]


def chained(change: Callable[[Any, Row, list[int]], Any]) -> Any:
    """`Good`, whose chains are changed, or its rows."""
    return but(Good, chain=lambda self, row: change(self, row, Good.chain(self, row)))


def observed(is_wrong: Callable[[Outcome], Any], base: type = Good, **attributes: Any) -> Any:
    """`base`, which does something else when it observes, and fails if that is true."""
    return but(base, observe=lambda self, outcome: fails() if is_wrong(outcome) else None, **attributes)


def forgotten(self: Good, row: Row, chain: list[int]) -> list[int]:
    row.num_cached -= 1
    return chain


FORGETS_TO_RELEASE = but(Good, release=lambda self, request_ids: None)
IS_RANDOM = chained(lambda self, row, chain: [random.randrange(self.vocab_size) for _ in range(4)])
FAULTS: dict[str, tuple[str, Callable[[DrafterContext], Any]]] = {
    "builds the same again": ("drafter.build", shared),
    "builds nothing": ("drafter.build", lambda context: []),
    "drafts lists": (
        "drafter.draft", proposed(lambda draft: replace(draft, token_ids=draft.token_ids.tolist()))
    ),
    "drafts int32": ("drafter.draft", proposed(lambda draft: replace(draft, token_ids=draft.token_ids.int()))),
    "overruns its budget": (
        "drafter.budget",
        but(Good, propose=lambda self, batch, budget: Draft.from_chains([[1] * (limit + 1) for limit in budget])),
    ),
    "overruns its budget with a tree": (
        "drafter.budget",
        but(GoodTrees, propose=lambda self, batch, budget: GoodTrees.propose(self, batch, [9] * len(budget))),
    ),
    "does not say that it drafts trees": ("drafter.tree", but(GoodTrees, drafts_trees=False)),
    "draws parents that are not before their children": (
        "drafter.tree",
        proposed(lambda draft: replace(draft, parents=tuple(max(node, 0) for node in draft.parents or ())), GoodTrees),
    ),
    "drafts beyond the end": (
        "drafter.depth",
        but(GoodTrees, propose=lambda self, batch, budget: Draft.from_chains([[1] * limit for limit in budget])),
    ),
    "is surer than sure": (
        "drafter.confidence",
        proposed(lambda draft: replace(draft, confidence=(100.0,) * draft.indptr[-1]), GoodTrees),
    ),
    "says nothing of some": ("drafter.confidence", proposed(lambda draft: replace(draft, confidence=()), GoodTrees)),
    "takes a way for a prefix": (
        "drafter.raises",
        observed(lambda outcome: any(list(way) != [*range(len(way))] for way in outcome.accepted), GoodTrees),
    ),
    "drafts outside of the vocabulary": (
        "drafter.vocabulary", chained(lambda self, row, chain: [token + 1 for token in chain])
    ),
    "appends to the batch": (  # as far out of reach as Python can put it
        "drafter.batch", chained(lambda self, row, chain: list.extend(row.tokens, chain[:1]) or chain)
    ),
    "overwrites a token in place": (
        "drafter.batch", chained(lambda self, row, chain: list.__setitem__(row.tokens, 0, 0) or chain)
    ),
    "forgets what is cached": ("drafter.batch", chained(forgotten)),
    "sets the default dtype": (
        "drafter.process", observed(lambda outcome: torch.set_default_dtype(torch.float16))
    ),
    "reuses its buffer": ("drafter.accounting", ReusesItsBuffer),
    "crashes without a budget": (
        "drafter.zero_budget",
        but(Good, propose=lambda self, *arguments: fails() if 0 in arguments[1] else Good.propose(self, *arguments)),
    ),
    "crashes on one token": ("drafter.limits", chained(lambda self, row, chain: [row.tokens[-2]])),
    "crashes when a row ends": (
        "drafter.limits", observed(lambda outcome: any(row.finish_reason is not None for row in outcome.batch))
    ),
    "crashes sometimes": (
        "drafter.raises", observed(lambda outcome: any(len(accepted) == 3 for accepted in outcome.accepted))
    ),
    "writes to hidden states": (
        "drafter.accounting",
        observed(lambda outcome: outcome.hidden.states[1].mul_(0.5).sum() is None, hidden_layers=(0, -1)),
    ),
    "is random": ("drafter.deterministic", IS_RANDOM),
    "has one memory for all": ("drafter.isolation", OneMemoryForAll),
    "counts on places": ("drafter.isolation", CountsOnPlaces),
    "forgets to release": ("drafter.release", FORGETS_TO_RELEASE),
    "misses unknown ids": ("drafter.release", MissesUnknownIds),
    "keeps what is in the middle": ("drafter.preemption", KeepsWhatIsInTheMiddle),
    "overwrites tokens later": ("drafter.lossless", OverwritesLater),
}  # fmt: skip


COMPARING = [  # tests that hold drafts against those of a drafter without a past
    "test_requests_do_not_touch_each_other",
    "test_released_requests_are_forgotten",
    "test_preempted_requests_begin_anew",
]


def test_a_good_drafter_breaks_no_rule(verdicts: Verdicts) -> None:
    assert verdicts(suite("drafter", Good)) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_rule_is_named(fault: str, verdicts: Verdicts) -> None:
    rule, make = FAULTS[fault]
    assert set((results := verdicts(suite("drafter", make), rule)).values()) == {rule}, results


@pytest.mark.nightly
def test_a_drafter_that_learns_across_requests_says_so_and_is_held_to_exactness_only(verdicts: Verdicts) -> None:
    uncompared = dict.fromkeys(COMPARING, "skipped: it learns across requests, and its drafts are not compared")
    assert verdicts(suite("drafter", OneMemoryForAll, learns_across_requests=True)) == uncompared
    assert verdicts(suite("drafter", FORGETS_TO_RELEASE, learns_across_requests=True)) == uncompared
    results = verdicts(suite("drafter", OverwritesLater, learns_across_requests=True), "drafter.lossless")
    assert results["test_tokens_equal_plain_greedy"] == "drafter.lossless"
    results = verdicts(suite("drafter", OverwritesLater, learns_across_requests=True), "drafter.isolation")
    assert results["test_requests_do_not_touch_each_other"] == "drafter.isolation"


def test_a_good_drafter_of_trees_breaks_no_rule(verdicts: Verdicts) -> None:
    assert verdicts(suite("drafter", GoodTrees)) == {}
