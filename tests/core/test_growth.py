"""Trees that grow best first, against all prefixes of the continuations, counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from fractions import Fraction
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting.growth import Tree, check_branches, grow_tree, joined_trees
from emssd.errors import ConfigError
from tests.support.tree_drafts import paths, paths_of

Texts = tuple[tuple[int, ...], ...]
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=12).map(tuple)


def following(texts: Texts) -> list[tuple[int, float, Texts]]:
    """First tokens of `texts`, the most frequent first, the lowest of equals."""
    counts = Counter(text[0] for text in texts if text)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return [
        (token, counts[token] / len(texts), tuple(text[1:] for text in texts if text[:1] == (token,)))
        for token in ranked
    ]


def grown(texts: Texts, *, num_nodes: int = 999, depth: int = 999, branches: int = 999, least: float = 0.0) -> Tree:
    return grow_tree(texts, following, num_nodes=num_nodes, depth=depth, branches=branches, least=least)


def counted(texts: Texts) -> dict[tuple[int, ...], Fraction]:
    """The share of `texts` that begin with each prefix that any of them has."""
    prefixes = {text[:size] for text in texts for size in range(1, len(text) + 1)}
    return {prefix: Fraction(sum(text[: len(prefix)] == prefix for text in texts), len(texts)) for prefix in prefixes}


def worth(tree: Tree) -> list[float]:
    found: list[float] = []
    for parent, chance in zip(tree.parents, tree.confidence, strict=True):
        found.append(chance * (found[parent] if parent >= 0 else 1.0))
    return found


@given(texts=TEXTS, num_nodes=st.integers(0, 20), depth=st.integers(0, 7))
def test_it_takes_the_most_frequent_prefixes_the_best_first(texts: Texts, num_nodes: int, depth: int) -> None:
    tree = grown(texts, num_nodes=num_nodes, depth=depth)
    shares = {prefix: share for prefix, share in counted(texts).items() if len(prefix) <= depth}
    found = paths(tree.token_ids, tree.parents)
    assert len(set(found)) == len(found) == min(num_nodes, len(shares))
    assert [shares[path] for path in found] == sorted(shares.values(), reverse=True)[:num_nodes]
    assert all(isclose(own, shares[path]) for own, path in zip(worth(tree), found, strict=True))


@given(texts=TEXTS, branches=st.integers(1, 4), depth=st.integers(1, 7), least=st.sampled_from([0.0, 0.2, 0.5]))
def test_it_has_no_more_ends_than_branches_and_the_likeliest_chain_among_its_paths(
    texts: Texts, branches: int, depth: int, least: float
) -> None:
    tree = grown(texts, branches=branches, depth=depth, least=least)
    found = paths(tree.token_ids, tree.parents)
    assert len(set(range(len(found))) - set(tree.parents)) <= branches
    assert len(found) <= branches * depth
    assert all(own >= least for own in worth(tree))
    chain, state, product = [], texts, 1.0
    while len(chain) < depth and (likeliest := following(state)[:1]):
        token, chance, state = likeliest[0]
        if (product := product * chance) < least:
            break
        chain.append(token)
    assert not chain or tuple(chain) in found
    if branches == 1:
        assert tree.token_ids == chain
        assert tree.parents == list(range(-1, len(chain) - 1))


def test_of_equally_likely_paths_one_is_finished_before_the_next_is_begun() -> None:
    tree = grown(((1, 2, 3), (4, 5, 6)))
    assert tree.token_ids == [1, 2, 3, 4, 5, 6]
    assert tree.parents == [-1, 0, 1, -1, 3, 4]
    assert tree.confidence == [0.5, 1.0, 1.0, 0.5, 1.0, 1.0]


def test_a_branch_that_is_not_among_the_likeliest_of_its_level_has_to_wait() -> None:
    texts = ((1, 1), (1, 1), (1, 2), (1, 2), (1, 2), (3, 3))
    assert paths_of(joined_trees([grown(texts, branches=2)])) == [(1,), (1, 2), (1, 1)]
    assert paths_of(joined_trees([grown(texts, branches=3)])) == [(1,), (1, 2), (1, 1), (3,), (3, 3)]


@given(rows=st.lists(TEXTS, max_size=4))
def test_trees_of_several_rows_lie_one_after_another(rows: Seq[Texts]) -> None:
    trees = [grown(texts) for texts in rows]
    draft = joined_trees(trees)
    assert draft.confidence is not None
    assert draft.lengths == [len(tree.token_ids) for tree in trees]
    for row, tree in enumerate(trees):
        start, stop = draft.indptr[row], draft.indptr[row + 1]
        assert paths_of(draft, row) == paths(tree.token_ids, tree.parents)
        assert list(draft.confidence[start:stop]) == tree.confidence


@pytest.mark.parametrize("branches", [0, -3])
def test_no_branch_is_a_config_error(branches: int) -> None:
    with pytest.raises(ConfigError, match=rf"^drafter\.branches is {branches}; it must be at least 1, which drafts ch"):
        check_branches(branches)
