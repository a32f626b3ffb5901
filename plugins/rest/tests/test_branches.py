"""REST with branches: the most frequent prefixes of what follows in the store, counted by hand; greedy exactly.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from emssd_rest import RestConfig
from emssd_rest.build import build_store
from emssd_rest.drafter import RestDrafter
from emssd_rest.store import Store
from hypothesis import given
from hypothesis import strategies as st

from emssd.errors import ConfigError
from tests.support.tree_drafts import paths_of, row_of, tree_of

TOKENS = st.integers(3, 5)
TEXTS = st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=1, max_size=20)


def opened(folder: Path, documents: list[list[int]]) -> Store:
    build_store(folder / "store", documents)
    return Store.open(folder / "store")


def continuations(config: RestConfig, documents: list[list[int]], tokens: list[int]) -> list[list[int]]:
    """Return what follows each place of the longest end of `tokens` that stands in the documents."""
    for size in range(min(config.max_match, len(tokens)), config.min_match - 1, -1):
        found = [
            text[end:]
            for text in documents
            for end in range(size, len(text) + 1)
            if text[end - size : end] == tokens[-size:]
        ]
        if found:
            return found
    return []


# More places than `repeats` are read from arrays, few from lists.
@given(
    documents=TEXTS,
    repeats=st.sampled_from([1, 1, 17]),
    tokens=st.lists(TOKENS, min_size=1, max_size=6),
    num_speculative_tokens=st.integers(1, 5),
    branches=st.integers(1, 5),
    budget=st.integers(0, 20),
    num_remaining=st.integers(1, 8),
)
def test_the_tree_is_made_of_the_most_frequent_prefixes(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    repeats: int,
    tokens: list[int],
    budget: int,
    num_remaining: int,
    **options: int,
) -> None:
    documents, config = documents * repeats, RestConfig(min_match=1, **options)
    drafter = RestDrafter(config, opened(tmp_path_factory.mktemp("text"), documents))
    row, depth = row_of(tokens, max_new_tokens=num_remaining), min(config.num_speculative_tokens, num_remaining - 1)
    budget = budget if config.branches > 1 else min(budget, depth)
    draft = tree_of(drafter, row, budget)
    texts, found = [text[:depth] for text in continuations(config, documents, tokens)], paths_of(draft)
    counts = {
        tuple(text[:size]): sum(other[:size] == text[:size] for other in texts)
        for text in texts
        for size in range(len(text) + 1)
    }
    assert set(found) <= set(counts)
    worths = [counts[path] for path in found]
    assert worths == sorted(worths, reverse=True)
    assert draft.confidence is not None
    assert list(draft.confidence) == [counts[path] / counts[path[:-1]] for path in found]
    ends = [path for path in found if not any(other[:-1] == path for other in found)]
    assert len(ends) <= config.branches
    if len(ends) < config.branches:
        assert worths == sorted((count for path, count in counts.items() if path), reverse=True)[:budget]


def test_as_published_there_are_so_many_nodes_and_any_branches(tmp_path: Path) -> None:
    draw = Random(0)
    store = opened(tmp_path, [[1, 2, *(draw.randrange(3, 9) for _ in range(10))] for _ in range(300)])
    drafter = RestDrafter(RestConfig(branches=64, num_nodes=64), store)
    assert drafter.num_speculative_tokens == 64
    draft = tree_of(drafter, row_of([7, 1, 2]), 999)
    assert draft.lengths == [64]
    assert set(range(3, 9)) == {path[0] for path in paths_of(draft)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"branches": 0}, r"drafter\.branches is 0; it must be at least 1"),
        (
            {"branches": 3, "num_nodes": 0},
            r"drafter\.num_nodes is 0 and drafter\.branches 3; the tokens of a tree",
        ),
        ({"num_nodes": 9}, r"drafter\.num_nodes is 9 and drafter\.branches 1; .*its branches at least 2"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_config_errors(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        RestDrafter(RestConfig(**options), opened(tmp_path, [[1, 2]]))
