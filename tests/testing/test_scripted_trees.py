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


def test_turns_choose_among_children_and_the_way_is_no_prefix() -> None:
    tree = [(1, -1), (2, -1), (3, 1), (4, 1), (0, 3)]
    ways = {
        turn: tuple(step([tree], [Decision(9, 9, 3, 3, turn)])[0].accepted[0]) for turn in range(4)
    }  # 3 is not among the children where a way ends
    assert ways == {0: (0,), 1: (1, 2), 2: (0,), 3: (1, 3, 4)}


def test_what_a_step_tells_of_trees() -> None:
    tree = [(1, -1), (2, -1), (3, 1), (4, 1), (0, 3)]
    _, log, _ = step(
        [tree, [(1, -1), (2, 0)], []], [Decision(9, 9, 3, 3, 3), Decision(9, 9, 1, 3), Decision(9, 9, 0, 1)]
    )
    (stats,) = log.steps
    assert stats.drafted == (5, 2, 0)
    assert stats.acceptance == (4, 2, 1)
    assert stats.depths == (3, 2, 0)
    assert stats.drafted_by_depth == (3, 3, 1)
    assert [is_accepted for _, is_accepted in stats.confidence] == [False, True, False, True, True, True, False]
    assert {told for told, _ in stats.confidence} == {0.5}
    _, log, _ = step([[(1, -1), (2, 0)]], [Decision(9, 9, 0, 3)])
    assert [is_accepted for _, is_accepted in log.steps[0].confidence] == [False], "below it nothing was chosen"


def test_what_the_target_says_off_its_way_depends_on_all_of_the_text() -> None:
    tree = [(1, -1), (2, -1), (3, 0), (3, 1), (4, 2), (4, 3)]
    outcome, _, _ = step([tree], [Decision(9, 9, 3, 0)])
    assert outcome.accepted[0] == [0, 2, 4]
    assert list(outcome.target_ids[0]) == [1, 3, 3, 4, 2, 0, 2]
