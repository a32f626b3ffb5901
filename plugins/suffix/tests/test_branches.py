"""Suffix decoding with branches: the tree of the likeliest continuations, against counting by hand; greedy exactly.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from emssd_suffix import SuffixConfig
from emssd_suffix.drafter import SuffixDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft, Outcome
from emssd.errors import ConfigError
from emssd.sequences import Batch, FinishReason
from tests.support.tree_drafts import paths_of, row_of, tree_of

Paths = dict[tuple[int, ...], float]
TOKENS = st.integers(3, 5)  # three letters: matches are everywhere
CONFIGS = st.builds(
    lambda num_tokens, longest, **options: SuffixConfig(num_tokens, num_tokens + longest, **options),
    num_tokens=st.integers(1, 5),
    longest=st.integers(2, 6),
    max_spec_factor=st.sampled_from([0.5, 1.0, 2.0, float("inf")]),
    min_token_prob=st.sampled_from([0.0, 0.1, 1 / 3, 1 / 2]),
    min_match_length=st.integers(1, 2),
    branches=st.integers(1, 4),
)


def behind(text: Seq[int], context: Seq[int]) -> dict[int, float]:
    """The count of each token that follows `context` in `text`, the most frequent first, of equals the latest."""
    size = len(context)
    found = [text[end] for end in range(size, len(text)) if list(text[end - size : end]) == list(context)]
    latest, counts = {token: place for place, token in enumerate(found)}, Counter(found)
    ranked = sorted(counts, key=lambda token: (-counts[token], -latest[token]))
    return {token: counts[token] / len(found) for token in ranked}


def chain_behind(config: SuffixConfig, text: Seq[int], length: int, most: int) -> tuple[list[int], float]:
    """The chain after the last `length` tokens, and its score."""
    chain, product, score = list[int](), 1.0, 0.0
    while len(chain) + 1 <= min(most, config.max_spec_factor * length):
        token, frequency = next(iter(behind(text, [*text[-length:], *chain]).items()), (None, 0.0))
        product *= frequency
        if token is None or product < config.min_token_prob:
            break
        chain.append(token)
        score += product
    return chain, score


def matched(config: SuffixConfig, text: Seq[int], most: int) -> tuple[list[int], int]:
    """The best chain, and how long a match it continues; of equal scores the longest match counts."""
    longest = config.max_tree_depth - config.num_speculative_tokens
    best, best_score, best_length = list[int](), 0.0, 0
    for length in range(min(longest, len(text)), config.min_match_length - 1, -1):
        chain, score = chain_behind(config, text, length, most)
        if score > best_score:
            best, best_score, best_length = chain, score, length
    return best, best_length


def trie(config: SuffixConfig, text: Seq[int], length: int, most: int) -> Paths:
    """By path, its probability: all continuations of the last `length` tokens that are long and likely enough."""
    found, level = Paths(), {(): 1.0}
    for depth in range(1, most + 1):
        if depth > config.max_spec_factor * length:
            break
        level = {
            (*path, token): product * frequency
            for path, product in level.items()
            for token, frequency in behind(text, [*text[-length:], *path]).items()
            if product * frequency >= config.min_token_prob
        }
        found |= level
    return found


@given(
    config=CONFIGS,
    text=st.lists(TOKENS, min_size=1, max_size=30),
    budget=st.integers(0, 12),
    num_remaining=st.integers(1, 8),
)
def test_the_tree_is_the_likeliest_part_of_the_trie_behind_the_match_of_the_chain(
    config: SuffixConfig, text: list[int], budget: int, num_remaining: int
) -> None:
    budget = budget if config.branches > 1 else min(budget, num_remaining - 1)
    draft = tree_of(SuffixDrafter(config), row_of(text, max_new_tokens=num_remaining), budget)
    most = min(budget, config.num_speculative_tokens, num_remaining - 1)
    chain, length = matched(config, text, most)
    everything, found = trie(config, text, length, most) if chain else Paths(), paths_of(draft)
    assert set(found) <= set(everything)
    assert bool(found) == bool(chain)
    products = [everything[path] for path in found]
    assert products == sorted(products, reverse=True)
    assert draft.confidence is not None
    for path, confidence in zip(found, draft.confidence, strict=True):
        assert confidence == behind(text, [*text[-length:], *path[:-1]])[path[-1]]
    if config.branches == 1:
        assert found == [tuple(chain[: depth + 1]) for depth in range(len(chain))]
    ends = [path for path in found if not any(other[:-1] == path for other in found)]
    if len(ends) < config.branches:  # nothing but the budget cut it, so the best are there
        assert products == pytest.approx(sorted(everything.values(), reverse=True)[:budget])


def test_an_end_of_the_text_is_no_continuation_and_counts_for_none() -> None:
    # After 3 comes 4 twice and 5 once; the last 3 is the end itself.
    config = SuffixConfig(max_spec_factor=2.0, branches=3)
    draft = tree_of(SuffixDrafter(config), row_of([3, 4, 6, 3, 5, 7, 3, 4, 8, 3]), 99)
    assert paths_of(draft) == [(4,), (4, 8), (4, 6), (5,), (5, 7)]
    assert draft.confidence == (2 / 3, 0.5, 0.5, 1 / 3, 1.0)


def test_the_end_of_a_remembered_output_is_no_token_of_a_tree() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_spec_factor=4.0, branches=4, cache_tokens=200, min_token_prob=0.0))
    for number, output in enumerate(([9, 3, 4], [9, 3, 5], [9, 3, 4])):
        row = replace(row_of([1], output, str(number)), finish_reason=FinishReason.LENGTH)
        drafter.observe(Outcome(Batch((row,)), Draft.empty(1), (range(0),), ((0,),)))
        drafter.release([str(number)])
    draft = tree_of(drafter, row_of([8, 9], name="b"), 99)
    assert paths_of(draft) == [(3,), (3, 4), (3, 5)]
    assert draft.confidence == (1.0, 2 / 3, 1 / 3)


@pytest.mark.parametrize("branches", [0, -1])
def test_no_branch_is_a_config_error(branches: int) -> None:
    with pytest.raises(ConfigError, match=rf"^drafter\.branches is {branches}; it must be at least 1"):
        SuffixDrafter(SuffixConfig(branches=branches))
