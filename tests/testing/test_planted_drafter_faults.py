"""The suite of drafters finds faults, one for each rule, and names the rule; a good drafter breaks none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.sequences import Batch, Row
from emssd.testing import DrafterConformance
from emssd.testing.conformance.suite import Suite
from tests.testing.conftest import Verdicts, planted


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
        before = [place for place, token in enumerate(text[:-1]) if token == text[-1]]
        return text[before[-1] + 1 :] if before else []


class OverBudget(Good):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains((self.chain(row) * 4)[: limit + 1] for row, limit in zip(batch, budget, strict=True))


class GoodTrees(Good):
    """Drafts all that followed the newest token earlier, as a tree, and how often that was."""

    num_speculative_tokens, drafts_trees = 8, True

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = [self.nodes(row)[:limit] for row, limit in zip(batch, budget, strict=True)]
        trees = Draft.from_trees([(token, parent) for token, parent, _ in row] for row in rows)
        draft = replace(trees, confidence=tuple(told for row in rows for *_, told in row))
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])

    def nodes(self, row: Row) -> list[tuple[int, int, float]]:
        self.chain(row)
        text = self.read[row.request_id]
        starts = [place + 1 for place, token in enumerate(text[:-1]) if token == text[-1]]
        nodes = dict[tuple[int, int], int]()
        for start in starts:
            parent = -1
            for token in text[start : start + 3]:
                parent = nodes.setdefault((token, parent), len(nodes))
        return [(token, parent, 1 / (1 + len(starts))) for token, parent in nodes]


class HidesItsTrees(GoodTrees):
    drafts_trees = False


class ChildrenFirst(GoodTrees):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = super().propose(batch, budget)
        return replace(draft, parents=tuple(max(parent, 0) for parent in draft.parents or ()))


class TooDeep(GoodTrees):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains([[1] * limit for limit in budget])


class TooSure(GoodTrees):
    def nodes(self, row: Row) -> list[tuple[int, int, float]]:
        return [(token, parent, 100 * told) for token, parent, told in super().nodes(row)]


class SureOfNothing(GoodTrees):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return replace(super().propose(batch, budget), confidence=())


class TreesOverBudget(GoodTrees):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return super().propose(batch, [limit + 1 for limit in budget])


class TakesWaysForPrefixes(GoodTrees):
    def observe(self, outcome: Outcome) -> None:
        assert all(list(nodes) == list(range(len(nodes))) for nodes in outcome.accepted)


class OutsideTheVocabulary(Good):
    def chain(self, row: Row) -> list[int]:
        return [token + 1 for token in super().chain(row)]


class NoTensor(Good):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = super().propose(batch, budget)
        return Draft(draft.token_ids.tolist(), draft.indptr)  # type: ignore[arg-type]  # that is the fault


class Int32(Good):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = super().propose(batch, budget)
        return Draft(draft.token_ids.int(), draft.indptr)


class Appends(Good):
    def chain(self, row: Row) -> list[int]:
        chain = super().chain(row)
        list.extend(row.tokens, chain[:1])  # as far out of reach as Python can put it
        return chain


class Overwrites(Good):
    def chain(self, row: Row) -> list[int]:
        chain = super().chain(row)
        list.__setitem__(row.tokens, 0, 0)
        return chain


class ReusesItsBuffer(Good):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self.draft = super().propose(batch, budget)
        return self.draft

    def observe(self, outcome: Outcome) -> None:
        outcome.draft.token_ids.zero_()


class CrashesWithoutBudget(Good):
    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if 0 in budget:
            raise ZeroDivisionError("of its own")
        return super().propose(batch, budget)


class CrashesOnOneToken(Good):
    def chain(self, row: Row) -> list[int]:
        return [row.tokens[-2]]


class CrashesWhenARowEnds(Good):
    def observe(self, outcome: Outcome) -> None:
        for row in outcome.batch:
            assert row.finish_reason is None


class CrashesSometimes(Good):
    def observe(self, outcome: Outcome) -> None:
        if any(len(accepted) == 3 for accepted in outcome.accepted):
            raise KeyError("three")


class IsRandom(Good):
    def chain(self, row: Row) -> list[int]:
        return [random.randrange(self.vocab_size) for _ in range(4)]


class OneMemoryForAll(Good):
    """Finds what followed the newest token in any request."""

    def chain(self, row: Row) -> list[int]:
        super().chain(row)
        behind = [text[place + 1] for text in self.read.values() for place in range(len(text) - 1)
                  if text[place] == row.tokens[-1]]  # fmt: skip
        return behind[:1]


class CountsOnPlaces(Good):
    """Remembers by row of the batch in the place of the request."""

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        chains = []
        for place, (row, limit) in enumerate(zip(batch, budget, strict=True)):
            text = self.read.setdefault(str(place), [])
            text += row.tokens[len(text) :]
            chains.append([text[0]][:limit])
        return Draft.from_chains(chains)


class ForgetsToRelease(Good):
    def release(self, request_ids: Iterable[str]) -> None:
        pass


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


class WritesToStates(Good):
    hidden_layers = (0, -1)

    def observe(self, outcome: Outcome) -> None:
        assert outcome.hidden is not None
        outcome.hidden.states[1].mul_(0.5)


FAULTS: dict[str, tuple[str, Callable[[DrafterContext], Any]]] = {
    "builds the same again": ("drafter.build", shared),
    "builds nothing": ("drafter.build", lambda context: []),
    "drafts lists": ("drafter.draft", NoTensor),
    "drafts int32": ("drafter.draft", Int32),
    "overruns its budget": ("drafter.budget", OverBudget),
    "overruns its budget with a tree": ("drafter.budget", TreesOverBudget),
    "does not say that it drafts trees": ("drafter.tree", HidesItsTrees),
    "draws parents that are not before their children": ("drafter.tree", ChildrenFirst),
    "drafts beyond the end": ("drafter.depth", TooDeep),
    "is surer than sure": ("drafter.confidence", TooSure),
    "says nothing of some": ("drafter.confidence", SureOfNothing),
    "takes a way for a prefix": ("drafter.raises", TakesWaysForPrefixes),
    "drafts outside of the vocabulary": ("drafter.vocabulary", OutsideTheVocabulary),
    "appends to the batch": ("drafter.batch", Appends),
    "overwrites a token in place": ("drafter.batch", Overwrites),
    "reuses its buffer": ("drafter.accounting", ReusesItsBuffer),
    "crashes without a budget": ("drafter.zero_budget", CrashesWithoutBudget),
    "crashes on one token": ("drafter.limits", CrashesOnOneToken),
    "crashes when a row ends": ("drafter.limits", CrashesWhenARowEnds),
    "crashes sometimes": ("drafter.raises", CrashesSometimes),
    "writes to hidden states": ("drafter.accounting", WritesToStates),
    "is random": ("drafter.deterministic", IsRandom),
    "has one memory for all": ("drafter.isolation", OneMemoryForAll),
    "counts on places": ("drafter.isolation", CountsOnPlaces),
    "forgets to release": ("drafter.release", ForgetsToRelease),
    "misses unknown ids": ("drafter.release", MissesUnknownIds),
    "keeps what is in the middle": ("drafter.preemption", KeepsWhatIsInTheMiddle),
    "overwrites tokens later": ("drafter.lossless", OverwritesLater),
}


COMPARING = [  # tests that hold drafts against those of a drafter without a past
    "test_requests_do_not_touch_each_other",
    "test_released_requests_are_forgotten",
    "test_preempted_requests_begin_anew",
]


def suite(make: Callable[[DrafterContext], Any], **attributes: Any) -> type[Suite]:
    return planted(DrafterConformance, "make_drafter", lambda self, context: make(context), **attributes)


def test_a_good_drafter_breaks_no_rule(verdicts: Verdicts) -> None:
    assert verdicts(suite(Good)) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_rule_is_named(fault: str, verdicts: Verdicts) -> None:
    rule, make = FAULTS[fault]
    assert set((found := verdicts(suite(make), rule)).values()) == {rule}, found


@pytest.mark.nightly
def test_a_drafter_that_learns_across_requests_says_so_and_is_held_to_exactness_only(verdicts: Verdicts) -> None:
    uncompared = dict.fromkeys(COMPARING, "skipped: it learns across requests, and its drafts are not compared")
    assert verdicts(suite(OneMemoryForAll, learns_across_requests=True)) == uncompared
    assert verdicts(suite(ForgetsToRelease, learns_across_requests=True)) == uncompared
    found = verdicts(suite(OverwritesLater, learns_across_requests=True), "drafter.lossless")
    assert found["test_tokens_equal_plain_greedy"] == "drafter.lossless"
    found = verdicts(suite(OverwritesLater, learns_across_requests=True), "drafter.isolation")
    assert found["test_requests_do_not_touch_each_other"] == "drafter.isolation"


def test_a_drafter_that_draws_says_so_and_is_held_to_exactness_only(verdicts: Verdicts) -> None:
    why = "skipped: it drafts at random, and its drafts are not compared"
    expected = dict.fromkeys(["test_it_drafts_the_same_again", *COMPARING], why)
    assert verdicts(suite(IsRandom, decides_at_random=True)) == expected
    found = verdicts(suite(OverwritesLater, decides_at_random=True), "drafter.lossless")
    assert found["test_tokens_equal_plain_greedy"] == "drafter.lossless"


def test_a_good_drafter_of_trees_breaks_no_rule(verdicts: Verdicts) -> None:
    assert verdicts(suite(GoodTrees)) == {}
