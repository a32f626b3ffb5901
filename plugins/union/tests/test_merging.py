"""Merged trees hold what was merged and nothing else; and what is found again in what is left of them."""

from __future__ import annotations

from math import prod

from emssd_union.drafter import RowDraft, merge
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trees import paths

TOKENS = st.integers(0, 2)  # three letters: drafts agree, and siblings are drafted twice


@st.composite
def drafts(draw: st.DrawFn, *, sure: bool | None = None) -> RowDraft:
    """Any tree, with confidence or without."""
    tokens = draw(st.lists(TOKENS, max_size=7))
    if draw(st.booleans()):
        parents = tuple(range(-1, len(tokens) - 1))
    else:
        parents = tuple(draw(st.integers(-1, node - 1)) for node in range(len(tokens)))
    if sure is False or (sure is None and draw(st.booleans())):
        return RowDraft(tokens, parents)
    return RowDraft(tokens, parents, [draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in tokens])


@given(several=st.lists(drafts(), max_size=4), num_nodes=st.integers(0, 25))
def test_a_merged_tree_holds_each_path_of_each_draft_once_as_far_as_the_budget_goes(
    several: list[RowDraft], num_nodes: int
) -> None:
    tree = merge(several, num_nodes)
    merged = paths(tree.token_ids, tree.parents)
    wanted = {path for draft in several for path in paths(draft.token_ids, draft.parents)}
    assert len(set(merged)) == len(merged) == min(num_nodes, len(wanted))
    assert set(merged) <= wanted
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))


@given(chains=st.lists(st.integers(0, 6), min_size=1, max_size=3), num_nodes=st.integers(0, 18))
def test_without_confidence_drafts_take_turns(chains: list[int], num_nodes: int) -> None:
    several = [RowDraft([which] * size, range(-1, size - 1)) for which, size in enumerate(chains)]
    tree = merge(several, num_nodes)
    depths = [len(path) for path in paths(tree.token_ids, tree.parents)]
    assert depths == sorted(depths)
    turns = [which for depth in range(6) for which, size in enumerate(chains) if depth < size]
    assert tree.token_ids == turns[:num_nodes]
    assert tree.confidence is None or not any(chains)


@given(several=st.lists(drafts(sure=True), max_size=4))
def test_a_node_is_as_likely_as_the_surest_draft_says(several: list[RowDraft]) -> None:
    tree = merge(several, 99)
    confidences: dict[tuple[int, ...], list[float]] = {}
    for draft in several:
        for path, confidence in zip(paths(draft.token_ids, draft.parents), draft.confidence or (), strict=True):
            confidences.setdefault(path, []).append(confidence)
    merged = paths(tree.token_ids, tree.parents)
    assert tree.confidence == [max(confidences[path]) for path in merged]


SURE = st.tuples(TOKENS, st.lists(st.sampled_from([0.25, 0.5, 1.0]), max_size=6))  # a token, and one chain of it


@given(several=st.lists(SURE, max_size=3, unique_by=lambda pair: pair[0]))
def test_where_all_are_sure_the_likeliest_path_goes_on(several: list[tuple[int, list[float]]]) -> None:
    chains = [RowDraft([token] * len(sure), range(-1, len(sure) - 1), sure) for token, sure in several]
    tree, sure_of = merge(chains, 99), dict(several)
    products = [prod(sure_of[path[0]][: len(path)]) for path in paths(tree.token_ids, tree.parents)]
    assert products == sorted(products, reverse=True)


@given(one=drafts(sure=False), other=drafts(sure=True))
def test_one_without_confidence_leaves_the_tree_without(one: RowDraft, other: RowDraft) -> None:
    assert (merge([one, other], 99).confidence is None) == bool(one.token_ids)
