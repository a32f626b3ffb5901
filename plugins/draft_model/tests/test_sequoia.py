"""The tree that is best for a known acceptance, against all trees of its size."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from emssd_draft_model.sequoia import MeasuredAcceptance, SequoiaShape, best_tree, read_acceptance
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.draft_models.growing_tree import GrowingTree
from emssd.errors import ConfigError

Way = tuple[int, ...]
Table = list[list[float]]


def at(table: Table, depth: int) -> list[float]:
    return table[min(depth, len(table)) - 1]


def expected_tokens(table: Table, tree: frozenset[Way] | set[Way]) -> float:
    """The expected number of accepted nodes: the sum over nodes of the probability that their whole way is accepted."""
    return math.fsum(math.prod(at(table, i)[rank] for i, rank in enumerate(way, start=1)) for way in tree)


@cache
def all_trees(num_nodes: int, width: int, depth: int) -> set[frozenset[Way]]:
    """Every tree of so many nodes, also such that skip a rank."""
    if num_nodes == 0:
        return {frozenset()}
    return {
        tree | {(*parent, rank)}
        for tree in all_trees(num_nodes - 1, width, depth)
        for parent in [(), *tree]
        for rank in range(width)
        if len(parent) < depth and (*parent, rank) not in tree
    }


def tables(max_depth: int = 3, max_width: int = 3) -> st.SearchStrategy[Table]:
    """Tables of chances in hundredths, in any order, with ties, certainties and impossibilities."""
    chance = st.integers(0, 100).map(lambda percent: percent / 100)
    width = st.integers(1, max_width)
    return width.flatmap(lambda w: st.lists(st.lists(chance, min_size=w, max_size=w), min_size=1, max_size=max_depth))


@settings(max_examples=60, deadline=None)
@given(table=tables(), num_nodes=st.integers(1, 5), depth=st.integers(1, 4))
def test_no_tree_of_its_size_is_expected_to_have_more_accepted(table: Table, num_nodes: int, depth: int) -> None:
    chosen = list(best_tree(table, num_nodes, depth))
    best = max(
        expected_tokens(table, tree) for size in range(num_nodes + 1) for tree in all_trees(size, len(table[0]), depth)
    )
    assert math.isclose(expected_tokens(table, set(chosen)), best, rel_tol=1e-12, abs_tol=1e-15)


@settings(max_examples=60, deadline=None)
@given(table=tables(4, 4), num_nodes=st.integers(1, 30), depth=st.integers(1, 5))
def test_it_is_a_tree_within_its_limits_and_its_beginning_is_the_best_smaller_tree(
    table: Table, num_nodes: int, depth: int
) -> None:
    chosen = list(best_tree(table, num_nodes, depth))
    assert len(chosen) == len(set(chosen)) <= num_nodes
    assert max(map(len, chosen), default=0) <= depth
    assert all(not way[:-1] or way[:-1] in chosen[:index] for index, way in enumerate(chosen))
    for size in range(num_nodes):
        assert list(best_tree(table, size, depth)) == chosen[:size]


def test_nodes_that_are_never_accepted_are_left_out() -> None:
    assert list(best_tree([[0.5, 0.0]], 9, 2)) == [(0,), (0, 0)]
    assert list(best_tree([[0.0]], 9, 2)) == []


def test_what_was_counted_often_is_believed_and_what_was_not_is_taken_from_all_depths() -> None:
    measured = MeasuredAcceptance(3, 3)
    before = measured.table()
    assert before[0] == before[1] == before[2]
    assert before[0][0] > before[0][1] > before[0][2] > 0
    for _ in range(500):
        measured.count([0, 1])
        measured.count([2, None])
    first, second, third = measured.table()
    assert first == pytest.approx([0.5, 0.0, 0.5], abs=0.02)
    assert second == pytest.approx([0.0, 0.5, 0.0], abs=0.02)
    assert third == pytest.approx([0.25, 0.25, 0.25], abs=0.02)  # nobody came so far
    assert all(math.fsum(level) <= 1 for level in (first, second, third))


def children(shape: SequoiaShape, num_nodes: int, depth: int) -> int:
    """The number of children of a row's newest token."""
    tree = GrowingTree(5, num_nodes, depth, 99)
    return sum(len(ranks) for _, ranks in shape.expand(tree, [-1]))


def test_it_plans_again_as_it_learns_the_same_in_every_run_and_forgets_on_request() -> None:
    tables = []
    for _ in range(2):
        shape = SequoiaShape(4, 4, 4)
        first, plans = shape._table, [children(shape, 4, 4)]
        for step in range(400):
            shape.learn([step % 4])  # at the first level every rank is right equally often
            shape.learn([None] * 2)
            shape.replan()
            plans.append(children(shape, 4, 4))
        assert plans[0] < 4
        assert plans[-1] == 4, "nothing is ever accepted below the first level"
        assert sum(a != b for a, b in pairwise(plans)) <= 4
        tables.append((shape._table, plans))
        shape.reset()
        assert shape._table == first
        assert children(shape, 4, 4) == plans[0]
    assert tables[0] == tables[1]


def test_each_row_gets_the_best_tree_within_its_own_limits() -> None:
    shape = SequoiaShape(20, 5, 3, [[0.6, 0.3, 0.05], [0.6, 0.3, 0.05]])
    assert children(shape, 20, 5) == 3
    assert children(shape, 3, 5) == 2
    assert children(shape, 1, 5) == 1
    assert children(shape, 3, 1) == 3
    assert shape.most_cached(3, 5) == 1
    assert shape.most_cached(3, 1) == 0


def test_a_given_table_is_not_learnt_over_and_ranks_beyond_top_k_are_not_used() -> None:
    shape = SequoiaShape(9, 3, 2, [[0.5, 0.3, 0.2]])
    for _ in range(100):
        shape.learn([None, None])
        shape.replan()
    assert shape._table == [[0.5, 0.3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0.5, 0.2]", r"cannot be read: .*delimiter"),
        ("{}", r"is not a list of lists; give a list of the levels"),
        ("[]", r"is not a list of lists"),
        ("[[0.5], []]", r"is not a list of lists"),
        ("[[0.5], [0.5, 1.5]]", r"has at level 2 the values \[0\.5, 1\.5\]; give"),
        ("[[NaN]]", r"has at level 1 the values \[nan\]"),
        ("[[true]]", r"has at level 1 the values \[True\]"),
        ('[["0.5"]]', r"has at level 1 the values \['0\.5'\]"),
        ("[[0.5], [0.6, 0.5]]", r"adds up to 1\.1 at level 2; give"),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"drafter\.acceptance=.*acceptance\.json " + message):
        read_acceptance(str(path))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.acceptance=/nowhere cannot be read: .*No such file"):
        read_acceptance("/nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_acceptance(str(tmp_path / "binary"))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps([[0.7, 0.1], [1, 0]]))
    assert read_acceptance(str(path)) == [[0.7, 0.1], [1.0, 0.0]]
