"""Trees by themselves, in drafts and in packed steps, beside the ways to their nodes written out by hand."""

from __future__ import annotations

import pytest
import torch
from emssd_testing.strategies import trees
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention.trees import ancestors, depths, hidden_nodes, is_chain, path
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from tests.support.trees import Tree, drawn_trees, paths_of

SHAPES = st.integers(0, 7).flatmap(trees)
FORESTS = st.lists(drawn_trees(), min_size=1, max_size=4)


def draft_of(forest: list[Tree], confidence: bool = False) -> Draft:
    draft = Draft.from_trees(forest)
    if not confidence:
        return draft
    numbers = tuple(node / (1 + draft.indptr[-1]) for node in range(draft.indptr[-1]))
    return Draft(draft.token_ids, draft.indptr, draft.parents, numbers)


@given(SHAPES)
def test_depth_counts_the_way_and_ancestors_lie_on_it(parents: tuple[int, ...]) -> None:
    nodes = range(len(parents))
    assert depths(parents) == [len(path(parents, node)) for node in nodes]
    assert ancestors(parents).tolist() == [[other in path(parents, node) for other in nodes] for node in nodes]
    assert is_chain(parents) == all(path(parents, node) == list(range(node + 1)) for node in nodes)


@given(FORESTS, st.booleans(), st.data())
def test_picked_nodes_keep_their_ways_and_their_confidence(
    forest: list[Tree], confidence: bool, data: st.DataObject
) -> None:
    draft, rows = draft_of(forest, confidence), []
    for row, tree in enumerate(forest):
        wanted = data.draw(
            st.sets(st.integers(0, len(tree) - 1), max_size=2) if tree else st.just(set()), label="nodes"
        )
        rows.append(sorted({node for leaf in wanted for node in path(draft.tree(row), leaf)}))
    picked = draft.pick(rows)
    assert picked.lengths == [len(nodes) for nodes in rows]
    for row, nodes in enumerate(rows):
        assert all(-1 <= parent < node for node, parent in enumerate(picked.tree(row)))
        assert paths_of(picked, row) == [paths_of(draft, row)[node] for node in nodes]
        if confidence:
            assert draft.confidence is not None
            assert picked.confidence is not None
            start = picked.indptr[row]
            expected = [draft.confidence[draft.indptr[row] + node] for node in nodes]
            assert list(picked.confidence[start : start + len(nodes)]) == expected
    assert confidence or picked.confidence is None


@pytest.mark.parametrize(
    ("parents", "limit", "shallow"),
    [
        ((-1, 0, 1, -1, 3, 3), 2, (-1, 0, -1, 2, 2)),  # a child that does not stand next to its parent
        ((-1, -1, 0, 2, 1, 1, 4), 2, (-1, -1, 0, 1, 1)),
        ((-1, 0, 1, 2, -1, 4, 4, 5), 3, (-1, 0, 1, -1, 3, 3, 4)),
    ],
)
def test_parents_are_counted_among_the_nodes_that_stay(
    parents: tuple[int, ...], limit: int, shallow: tuple[int, ...]
) -> None:
    draft = Draft.from_trees([[(9, -1)], list(enumerate(parents))])
    assert draft.shallow([1, limit]).parents == (-1, *shallow)


@given(FORESTS, st.booleans(), st.data())
def test_the_first_nodes_of_a_row_are_a_tree(forest: list[Tree], confidence: bool, data: st.DataObject) -> None:
    draft = draft_of(forest, confidence)
    lengths = [data.draw(st.integers(0, len(tree)), label="length") for tree in forest]
    cut, expected = draft.cut(lengths), draft_of([tree[:length] for tree, length in zip(forest, lengths, strict=True)])
    assert (cut.token_ids.tolist(), cut.indptr) == (expected.token_ids.tolist(), expected.indptr)
    assert cut.parents == expected.parents
    assert (cut.confidence is None) != confidence


@given(FORESTS, st.data())
def test_shallow_nodes_are_those_up_to_a_depth(forest: list[Tree], data: st.DataObject) -> None:
    draft = Draft.from_trees(forest)
    limits = [data.draw(st.integers(0, 4), label="limit") for _ in forest]
    shallow = draft.shallow(limits)
    for row, limit in enumerate(limits):
        assert paths_of(shallow, row) == [text for text in paths_of(draft, row) if len(text) <= limit]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row], list[Tree], list[tuple[Row, int]]]:
    """Rows that are cached but for a few tokens, a tree for each, and pieces of other rows' prompts."""
    rows = []
    for number in range(draw(st.integers(1, 3))):
        row = Row(Request(f"r{number}", tuple(range(draw(st.integers(1, 6)))), 20))
        row.num_cached = draw(st.integers(0, len(row.tokens) - 1))
        rows.append(row)
    pieces = [(Row(Request("piece", (7, 8, 9), 9), num_cached=1), 1)] if draw(st.booleans()) else []
    return rows, [draw(drawn_trees()) for _ in rows], pieces


def positions_by_hand(row: Row, tree: Tree) -> list[int]:
    parents = [parent for _, parent in tree]
    return [*range(len(row.tokens)), *(len(row.tokens) - 1 + len(path(parents, node)) for node in range(len(tree)))]


@given(steps())
def test_a_packed_tree_stands_by_depth_behind_its_row(
    step: tuple[list[Row], list[Tree], list[tuple[Row, int]]],
) -> None:
    rows, forest, pieces = step
    packed = pack(rows, Draft.from_trees(forest), pieces)
    for number, (row, tree) in enumerate(zip(rows, forest, strict=True)):
        tokens = slice(packed.qo_indptr[number], packed.qo_indptr[number + 1])
        positions = positions_by_hand(row, tree)
        assert packed.kv_lens[number] == len(positions)
        assert packed.kv_positions(number) == positions
        assert packed.position_ids[tokens].tolist() == positions[row.num_cached :]
        drafted = [token for token, _ in tree]
        assert packed.input_ids[tokens].tolist() == [*row.tokens, *drafted][row.num_cached :]
        parents = tuple(parent for _, parent in tree)
        branches = () if packed.trees is None else packed.trees[number]
        assert branches == (() if is_chain(parents) else parents)
    if pieces:
        assert packed.kv_positions(len(rows)) == [0, 1]
        assert packed.trees is None or packed.trees[-1] == ()
    assert (packed.trees is None) == all(is_chain([parent for _, parent in tree]) for tree in forest)


@given(steps(), st.data())
def test_nodes_packed_level_by_level_are_the_nodes_of_one_step(
    step: tuple[list[Row], list[Tree], list[tuple[Row, int]]], data: st.DataObject
) -> None:
    rows, forest, _ = step
    whole = pack(rows, Draft.from_trees(forest))
    grown = [0] * len(rows)
    by_row: list[list[tuple[int, int]]] = [[] for _ in rows]
    while active := [i for i, tree in enumerate(forest) if grown[i] < len(tree)]:
        lengths = [data.draw(st.integers(1, len(forest[i]) - grown[i]), label="new nodes") for i in active]
        for i, length in zip(active, lengths, strict=True):
            grown[i] += length
        nodes = [forest[i][: grown[i]] for i in active]
        packed = pack_nodes(
            [rows[i].request_id for i in active],
            torch.tensor([token for tree, n in zip(nodes, lengths, strict=True) for token, _ in tree[-n:]]),
            lengths,
            [len(rows[i].tokens) + grown[i] for i in active],
            [[parent for _, parent in tree] for tree in nodes],
        )
        assert packed.logit_rows.tolist() == list(range(sum(lengths)))
        for number, i in enumerate(active):
            tokens = slice(packed.qo_indptr[number], packed.qo_indptr[number + 1])
            ids, positions = packed.input_ids[tokens].tolist(), packed.position_ids[tokens].tolist()
            by_row[i] += zip(ids, positions, strict=True)
            assert packed.kv_positions(number) == positions_by_hand(rows[i], nodes[number])
    for number, row in enumerate(rows):
        tokens = slice(whole.qo_indptr[number] + len(row.tokens) - row.num_cached, whole.qo_indptr[number + 1])
        assert by_row[number] == list(
            zip(whole.input_ids[tokens].tolist(), whole.position_ids[tokens].tolist(), strict=True)
        )


@given(st.lists(st.tuples(SHAPES, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3), st.data())
def test_hidden_are_the_nodes_that_are_no_ancestors(
    rows: list[tuple[tuple[int, ...], int, int]], data: st.DataObject
) -> None:
    """Each row: its tree, how many tokens before it are new, and how far apart the slots of its nodes lie."""
    given_rows, expected = [], set()
    for number, (tree, num_before, gap) in enumerate(rows):
        slots = [2 + node * (gap + 1) for node in range(len(tree))]
        num_cached = data.draw(st.integers(0, len(tree) - 1), label="cached nodes") if tree else 0
        num_before = num_before if not num_cached else 0
        given_rows.append((tree, num_before + len(tree) - num_cached, slots))
        for node in range(num_cached, len(tree)):
            strangers = set(range(len(tree))) - set(path(tree, node))
            expected |= {(number, num_before + node - num_cached, slots[other]) for other in strangers}
    hidden = hidden_nodes(given_rows, num_queries=12, num_slots=40)
    assert hidden.shape == (len(rows), 12, 40)
    assert {tuple(entry) for entry in hidden.nonzero().tolist()} == expected


@given(steps())
def test_logits_are_wanted_of_each_newest_token_and_each_drafted_one(
    step: tuple[list[Row], list[Tree], list[tuple[Row, int]]],
) -> None:
    rows, forest, pieces = step
    packed = pack(rows, Draft.from_trees(forest), pieces)
    ends = zip(packed.qo_indptr[1:], forest, strict=False)
    assert packed.logit_rows.tolist() == [token for end, tree in ends for token in range(end - 1 - len(tree), end)]
