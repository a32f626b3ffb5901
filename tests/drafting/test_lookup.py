"""The index of a growing text, trees that grow best first, and the trees of prompt lookup, each against its definition.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from fractions import Fraction
from math import isclose
from typing import Any

import pytest
from emssd_llma import LLMAConfig, LLMADrafter, Search
from emssd_pld import Occurrence, PLDConfig, PLDDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting.draft import joined_trees
from emssd.drafting.growth import Tree, grow_tree
from emssd.drafting.lookup import NGramIndex
from emssd.sequences import Row
from tests.support.trees import paths, paths_of, row_of, tree_of

TOKENS = st.integers(3, 5)  # three letters: matches are everywhere
OPTIONS: dict[str, Any] = {
    "occurrence": st.sampled_from(Occurrence),
    "require_full_copy": st.booleans(),
    "branches": st.integers(1, 4),
}
LLMA = st.builds(
    LLMAConfig, match_length=st.integers(1, 3), copy_length=st.integers(1, 5), search=st.sampled_from(Search), **OPTIONS
)
PLD = st.builds(
    lambda sizes, **options: PLDConfig(max_ngram_size=max(sizes), min_ngram_size=min(sizes), **options),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    num_speculative_tokens=st.integers(1, 5),
    **OPTIONS,
)
CONFIGS = LLMA | PLD


def copies(config: LLMAConfig | PLDConfig, row: Row) -> list[list[int]]:
    """By definition: what stands after each place that is copied from, in the order of choice."""
    tokens = list(row.tokens)
    if isinstance(config, LLMAConfig):
        text = tokens[: len(row.request.prompt_ids)] if config.search is Search.prompt else tokens
        sizes, copied = [config.match_length], config.copy_length
    else:
        text, sizes, copied = (
            tokens,
            list(range(config.max_ngram_size, config.min_ngram_size - 1, -1)),
            config.num_speculative_tokens,
        )
    for size in sizes:
        needed = copied if config.require_full_copy else 1
        if config.require_full_copy and isinstance(config, PLDConfig):
            needed = max(needed, size + 1)
        ends = [
            end
            for end in range(size, len(text) - needed + 1)
            if len(tokens) >= size and text[end - size : end] == tokens[-size:]
        ]
        if ends:
            chosen = ends if config.occurrence is Occurrence.first else ends[::-1]
            return [text[end:][:copied] for end in chosen[: config.branches]]
    return []


@given(
    config=CONFIGS,
    prompt=st.lists(TOKENS, min_size=1, max_size=24),
    growth=st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=6), st.integers(0, 9)), max_size=6),
    num_remaining=st.integers(1, 8),
)
def test_the_tree_is_the_trie_of_the_copies_and_the_common_tokens_come_first(
    config: LLMAConfig | PLDConfig, prompt: list[int], growth: list[tuple[list[int], int]], num_remaining: int
) -> None:
    drafter = LLMADrafter(config) if isinstance(config, LLMAConfig) else PLDDrafter(config)
    assert drafter.drafts_trees == (config.branches > 1)
    grown = sum(len(new) for new, _ in growth)
    row = row_of(prompt, max_new_tokens=grown + num_remaining)
    for new, budget in [([], 9), *growth]:
        row.extend(new)
        depth = row.num_remaining - 1
        budget = budget if drafter.drafts_trees else min(budget, depth)
        cut = [copy[:depth] for copy in copies(config, row)]
        prefixes = {tuple(copy[:size]) for copy in cut for size in range(1, len(copy) + 1)}
        share = {path: Fraction(sum(tuple(copy[: len(path)]) == path for copy in cut), len(cut)) for path in prefixes}
        draft = tree_of(drafter, row, budget)
        drafted = paths_of(draft)
        assert len(set(drafted)) == len(drafted) == min(budget, len(prefixes), drafter.num_speculative_tokens)
        assert [share[path] for path in drafted] == sorted(share.values(), reverse=True)[: len(drafted)]
        for path, chance in zip(drafted, draft.confidence or (), strict=drafter.drafts_trees):
            assert chance == pytest.approx(float(share[path] / share.get(path[:-1], Fraction(1))))


def test_one_tree_of_a_text_that_went_on_in_three_ways() -> None:
    text = [3, 4, 10, 11, 3, 4, 10, 12, 3, 4, 20, 21, 3, 4]
    config = PLDConfig(max_ngram_size=2, num_speculative_tokens=2, occurrence=Occurrence.last, branches=3)
    draft = tree_of(PLDDrafter(config), row_of(text), 99)
    assert paths_of(draft) == [(10,), (10, 12), (10, 11), (20,), (20, 21)]
    assert draft.confidence == (2 / 3, 0.5, 0.5, 1 / 3, 1.0)
    latest_two = PLDConfig(max_ngram_size=2, num_speculative_tokens=2, occurrence=Occurrence.last, branches=2)
    assert paths_of(tree_of(PLDDrafter(latest_two), row_of(text), 99)) == [(20,), (20, 21), (10,), (10, 12)]
    first_two = PLDConfig(max_ngram_size=2, num_speculative_tokens=2, branches=2)
    assert paths_of(tree_of(PLDDrafter(first_two), row_of(text), 99)) == [(10,), (10, 11), (10, 12)]


class Watched(list[int]):
    """Counts where each slice begins that is read."""

    def __init__(self, tokens: list[int], read: Counter[int]) -> None:
        super().__init__(tokens)
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        self._read[key.start] += 1
        return super().__getitem__(key)


@given(
    size=st.integers(1, 4),
    num_behind=st.integers(1, 8),
    occurrence=st.sampled_from(Occurrence),
    num_places=st.integers(1, 3),
    text=st.lists(st.integers(3, 5), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_each_n_gram_is_read_once_however_the_text_grows(
    size: int, num_behind: int, occurrence: Occurrence, num_places: int, text: list[int], cuts: list[int]
) -> None:
    read: Counter[int] = Counter()
    index = NGramIndex(size, num_behind, occurrence, num_places)
    for cut in [*sorted(cut for cut in cuts if cut <= len(text)), len(text), len(text)]:
        index.extend(Watched(text[:cut], read), cut)
        places = [
            start + size
            for start in range(cut - size - num_behind + 1)
            if text[start : start + size] == text[:cut][-size:]
        ]
        chosen = places if occurrence is Occurrence.first else places[::-1]
        assert list(index.find(text[:cut])) == chosen[:num_places]
    assert read == Counter(range(max(0, len(text) - size - num_behind + 1)))


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


def worth(tree: Tree) -> list[float]:
    products: list[float] = []
    for parent, chance in zip(tree.parents, tree.confidence, strict=True):
        products.append(chance * (products[parent] if parent >= 0 else 1.0))
    return products


@given(texts=TEXTS, num_nodes=st.integers(0, 20), depth=st.integers(0, 7))
def test_it_takes_the_most_frequent_prefixes_the_best_first(texts: Texts, num_nodes: int, depth: int) -> None:
    tree = grown(texts, num_nodes=num_nodes, depth=depth)
    prefixes = {text[:size] for text in texts for size in range(1, min(len(text), depth) + 1)}
    shares = {prefix: Fraction(sum(text[: len(prefix)] == prefix for text in texts), len(texts)) for prefix in prefixes}
    drafted = paths(tree.token_ids, tree.parents)
    assert len(set(drafted)) == len(drafted) == min(num_nodes, len(shares))
    assert [shares[path] for path in drafted] == sorted(shares.values(), reverse=True)[:num_nodes]
    assert all(isclose(product, shares[path]) for product, path in zip(worth(tree), drafted, strict=True))


@given(texts=TEXTS, branches=st.integers(1, 4), depth=st.integers(1, 7), least=st.sampled_from([0.0, 0.2, 0.5]))
def test_it_has_no_more_ends_than_branches_and_the_likeliest_chain_among_its_paths(
    texts: Texts, branches: int, depth: int, least: float
) -> None:
    tree = grown(texts, branches=branches, depth=depth, least=least)
    drafted = paths(tree.token_ids, tree.parents)
    assert len(set(range(len(drafted))) - set(tree.parents)) <= branches
    assert len(drafted) <= branches * depth
    assert all(product >= least for product in worth(tree))
    chain, state, product = [], texts, 1.0
    while len(chain) < depth and (likeliest := following(state)[:1]):
        token, chance, state = likeliest[0]
        if (product := product * chance) < least:
            break
        chain.append(token)
    assert not chain or tuple(chain) in drafted
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
