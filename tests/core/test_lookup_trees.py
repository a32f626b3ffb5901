"""Prompt lookup with branches: the tree holds what followed each of so many earlier places, and nothing else.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from emssd_llma import LLMAConfig, LLMADrafter, Search
from emssd_pld import Occurrence, PLDConfig, PLDDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.errors import ConfigError
from emssd.sequences import Row
from tests.support.tree_drafts import paths_of, row_of, tree_of

TOKENS = st.integers(3, 5)  # three letters: matches are everywhere
OPTIONS: dict[str, Any] = {
    "occurrence": st.sampled_from(Occurrence),
    "require_full_copy": st.booleans(),
    "branches": st.integers(1, 4),
}
LLMA = st.builds(
    LLMAConfig,
    match_length=st.integers(1, 3),
    copy_length=st.integers(1, 5),
    search=st.sampled_from(Search),
    **OPTIONS,
)
PLD = st.builds(
    lambda sizes, **options: PLDConfig(max_ngram_size=max(sizes), min_ngram_size=min(sizes), **options),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    num_speculative_tokens=st.integers(1, 5),
    **OPTIONS,
)
CONFIGS = LLMA | PLD


def make(config: LLMAConfig | PLDConfig) -> LLMADrafter | PLDDrafter:
    return LLMADrafter(config) if isinstance(config, LLMAConfig) else PLDDrafter(config)


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
    drafter = make(config)
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
        found = paths_of(draft)
        assert len(set(found)) == len(found) == min(budget, len(prefixes), drafter.num_speculative_tokens)
        assert [share[path] for path in found] == sorted(share.values(), reverse=True)[: len(found)]
        for path, chance in zip(found, draft.confidence or (), strict=drafter.drafts_trees):
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


@pytest.mark.parametrize("branches", [0, -1])
def test_no_branch_is_a_config_error(branches: int) -> None:
    for config in (LLMAConfig(branches=branches), PLDConfig(branches=branches)):
        with pytest.raises(ConfigError, match=rf"^drafter\.branches is {branches}; it must be at least 1"):
            make(config)
