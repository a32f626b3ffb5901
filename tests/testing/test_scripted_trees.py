"""The engine that follows a script takes ways through trees, and its target says the same after the same text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft, Drafter, Outcome
from emssd.drafting.budget import FixedBudget
from emssd.sequences import Batch, Request, Row
from emssd.simulate.recording import StepLog
from emssd.testing.conformance.scripted import Decision, ScriptedEngine

VOCAB_SIZE = 5


class Trees(Drafter):
    """Drafts trees that are given, with confidence, and keeps what it hears."""

    num_speculative_tokens, drafts_trees = 9, True

    def __init__(self, trees: Seq[list[tuple[int, int]]]) -> None:
        self.trees = trees
        self.heard: list[Outcome] = []

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = Draft.from_trees(tree[:limit] for tree, limit in zip(self.trees, budget, strict=True))
        return replace(draft, confidence=(0.5,) * draft.indptr[-1])

    def observe(self, outcome: Outcome) -> None:
        self.heard.append(outcome)


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Up to nine nodes of few different tokens, so that siblings are often alike."""
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=9))
    return [(token, draw(st.integers(-1, node - 1))) for node, token in enumerate(tokens)]


DECISIONS = st.builds(
    Decision, st.just(9), st.just(9), st.integers(0, 5), st.integers(0, VOCAB_SIZE - 1), st.integers(0, 7)
)


def step(drafted: Seq[list[tuple[int, int]]], decisions: Seq[Decision]) -> tuple[Outcome, StepLog, list[Row]]:
    drafter, log = Trees(drafted), StepLog(FixedBudget())
    rows = [Row(Request(str(row), (1, 2), 99), num_cached=1) for row in range(len(drafted))]
    ScriptedEngine([drafter], log, VOCAB_SIZE).take(rows, decisions)
    (outcome,) = drafter.heard
    return outcome, log, rows


@given(st.lists(st.tuples(trees(), DECISIONS), min_size=1, max_size=3))
def test_a_way_is_taken_and_what_the_target_says_depends_on_the_text_alone(
    drawn: list[tuple[list[tuple[int, int]], Decision]],
) -> None:
    outcome, _, rows = step([tree for tree, _ in drawn], [decision for _, decision in drawn])
    for (tree, decision), way, targets, row in zip(drawn, outcome.accepted, outcome.target_ids, rows, strict=True):
        texts: list[tuple[int, ...]] = [()]
        for token, parent in tree:
            texts.append((*texts[parent + 1], token))
        said = dict(zip(texts, targets, strict=True))
        assert [said[text] for text in texts] == list(targets), "two nodes of one text have different targets"
        assert [tree[node][1] for node in way] == [-1, *way][:-1], "a way goes from parent to child"
        for node in way:
            assert targets[tree[node][1] + 1] == tree[node][0]
        assert list(row.output_ids) == [*(tree[node][0] for node in way), targets[way[-1] + 1 if way else 0]]
        if len({token for token, _ in tree}) < VOCAB_SIZE:  # some token can follow that is not drafted
            end = texts[way[-1] + 1 if way else 0]
            is_leaf = not any(text[:-1] == end for text in texts[1:])
            assert len(way) == decision.agree or (is_leaf and len(way) < decision.agree)
