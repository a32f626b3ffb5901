"""Suffix decoding against counting by hand in the row's text and in the outputs before; through the engine, exactly.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from emssd_suffix import SuffixConfig
from emssd_suffix.automaton import SEPARATOR
from emssd_suffix.drafter import SuffixDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft, Drafter, Outcome
from emssd.errors import ConfigError
from emssd.sequences import Batch, FinishReason, Row
from tests.support.tiers import looped
from tests.support.trees import chains_of, paths_of, row_of, tree_of

TOKENS = st.integers(3, 5)  # three letters: matches are everywhere
CONFIGS = st.builds(
    lambda num_tokens, longest, **options: SuffixConfig(num_tokens, num_tokens + longest, **options),
    num_tokens=st.integers(1, 6),
    longest=st.integers(2, 6),
    max_spec_factor=st.sampled_from([0.5, 1.0, 2.0, float("inf")]),
    min_token_prob=st.sampled_from([0.0, 0.1, 1 / 3, 0.4, 1 / 2, 2 / 3, 1.0]),
    min_match_length=st.integers(1, 2),
    cache_tokens=st.sampled_from([0, 24, 60]),
    cache_bias=st.integers(0, 2),
)


def behind(text: Seq[int], context: Seq[int]) -> dict[int, float]:
    """The share of each token that follows `context` in `text`, the most frequent first, of equals the latest."""
    size = len(context)
    followers = [text[end] for end in range(size, len(text)) if list(text[end - size : end]) == list(context)]
    latest, counts = {token: index for index, token in enumerate(followers)}, Counter(followers)
    ranked = sorted({*counts} - {SEPARATOR}, key=lambda token: (-counts[token], -latest[token]))
    return {token: counts[token] / len(followers) for token in ranked}


def from_counts(
    config: SuffixConfig, text: Seq[int], tokens: Seq[int], length: int, budget: int
) -> tuple[list[int], float]:
    """A draft after the last `length` of `tokens`, by counting what follows in `text`; and its score."""
    context, product, score = list(tokens[-length:]), 1.0, 0.0
    while len(context) - length + 1 <= min(budget, config.max_spec_factor * length):
        token, frequency = next(iter(behind(text, context).items()), (SEPARATOR, 0.0))
        product *= frequency
        if token == SEPARATOR or product < config.min_token_prob:
            break
        context.append(token)
        score += product
    return context[length:], score


def by_definition(
    config: SuffixConfig, generations: Seq[Seq[int]], tokens: Seq[int], budget: int
) -> tuple[list[int], int]:
    """The draft of the best score over all lengths of a text's match, and that length; the preferred text decides."""
    longest = config.max_tree_depth - config.num_speculative_tokens
    ranked: list[tuple[float, Seq[int], int]] = []
    for i, text in enumerate([tokens, *generations]):
        inside = [*text][: len(text) - (i == 0)]  # the end of the row's own text is no match of itself
        ends = range(min(longest, len(tokens)), 0, -1)
        matches = (n for n in ends if any(inside[k : k + n] == list(tokens[-n:]) for k in range(len(inside) - n + 1)))
        length = next(matches, 0)
        ranked.append((length + (config.cache_bias if i == 0 else 0), text, length))
    for _, text, length in sorted(ranked, key=lambda entry: -entry[0]):
        lengths = range(length, config.min_match_length - 1, -1)
        drafts = [(*from_counts(config, text, tokens, n, budget), n) for n in lengths]
        chain, score, match = max(drafts, key=lambda draft: draft[1], default=([], 0.0, 0))
        if score > 0:
            return chain, match
    return [], 0


class AsDefined(SuffixDrafter):
    """Compares each of its drafts with counting by hand."""

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__(config)
        self.generations: list[list[int]] = []

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = super().propose(batch, budget)
        expected = [
            by_definition(self._config, self.generations, row.tokens, min(limit, self.num_speculative_tokens))[0]
            for row, limit in zip(batch, budget, strict=True)
        ]
        assert chains_of(draft) == expected
        return draft

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        most = self._config.cache_tokens // 2
        for row in outcome.batch:
            if most and row.finish_reason:
                text = [*row.output_ids[1 - most :], SEPARATOR]
                if self.generations and len(self.generations[0]) + len(text) <= most:
                    self.generations[0] += text
                else:
                    self.generations = [text, *self.generations[:1]]


def drafted(drafter: Drafter, row: Row, budget: int = 15) -> list[int]:
    return drafter.propose(Batch((row,)), [budget]).token_ids.tolist()


def finish(drafter: Drafter, prompt: Seq[int], output: Seq[int], name: str = "done") -> None:
    batch = Batch((replace(row_of(prompt, output, name), finish_reason=FinishReason.LENGTH),))
    drafter.observe(Outcome(batch, Draft.empty(1), (range(0),), ()))
    drafter.release([name])


ROW = st.tuples(st.integers(0, 2), st.lists(TOKENS, min_size=1, max_size=6), st.integers(0, 7), st.integers(0, 5))


@given(config=CONFIGS, steps=st.lists(st.lists(ROW, min_size=1, max_size=3), max_size=12))
def test_it_drafts_what_counting_by_hand_drafts_while_rows_grow_end_and_come_again(
    config: SuffixConfig, steps: list[list[tuple[int, list[int], int, int]]]
) -> None:
    drafter = AsDefined(config)
    rows = {i: row_of([3, 4, 3, 4, 5], name=str(i)) for i in range(3)}
    for step in steps:
        for i, new, _, _ in step:
            rows[i].extend(new)
        limits = {i: limit for i, _, limit, _ in step}
        drafter.propose(Batch(tuple(rows[i] for i in limits)), list(limits.values()))
        for i, _, _, fate in step:
            if fate == 0:  # finished, and another of that name comes
                finish(drafter, rows[i].request.prompt_ids, rows[i].output_ids, str(i))
                rows[i] = row_of([5, 4], name=str(i))
            elif fate == 1:  # preempted
                drafter.release([str(i)])


def test_the_defaults_are_those_of_the_papers_implementations() -> None:
    config = SuffixConfig()
    assert (config.max_tree_depth, config.max_spec_factor, config.min_token_prob) == (64, 1.0, 0.1)
    assert (config.num_speculative_tokens, config.cache_bias) == (15, 5)
    drafter = SuffixDrafter(config)
    text = [1, 2, 3, *range(20, 40), 1, 2, 3]
    assert drafted(drafter, row_of(text)) == [20, 21, 22]  # no more than were matched
    finish(drafter, [1], text)
    assert drafted(drafter, row_of([1, 2, 3], name="b")) == []  # without a cache no row knows of another


@looped(("least", "expected"), [(1 / 3, [4, 5, 3, 6]), (0.34, [4, 5, 3]), (2 / 3, [4, 5, 3]), (0.67, [])])
def test_a_draft_ends_where_its_probability_by_what_followed_before_falls_below_the_least(
    least: float, expected: list[int]
) -> None:
    # After 3 comes 4 in two cases of three; then always 5, and 3; then, the latest, 6 in one case of two.
    drafter = SuffixDrafter(SuffixConfig(max_spec_factor=4.0, min_token_prob=least))
    assert drafted(drafter, row_of([3, 4, 5, 3, 4, 5, 3, 6, 7, 3])) == expected


@looped(
    ("options", "sentence"),
    [
        ({"max_tree_depth": 15}, "max_tree_depth is 15; it must be above drafter.num_speculative_tokens=15"),
        ({"min_match_length": 50}, "min_match_length is 50; it must be from 1 to 49"),
        ({"cache_tokens": 127}, "cache_tokens is 127; it must be 0 for no cache, or at least 128"),
    ],
)
def test_options_out_of_range_are_config_errors_that_say_what_they_may_be(options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"drafter.{sentence}"):
        SuffixDrafter(SuffixConfig(**options))


Paths = dict[tuple[int, ...], float]


def trie(config: SuffixConfig, text: Seq[int], length: int, most: int) -> Paths:
    """By path, its probability: all continuations of the last `length` tokens that are long and likely enough."""
    products, level = Paths(), {(): 1.0}
    for depth in range(1, most + 1):
        if depth > config.max_spec_factor * length:
            break
        level = {
            (*path, token): product * frequency
            for path, product in level.items()
            for token, frequency in behind(text, [*text[-length:], *path]).items()
            if product * frequency >= config.min_token_prob
        }
        products |= level
    return products


@given(
    config=CONFIGS,
    branches=st.integers(1, 4),
    text=st.lists(TOKENS, min_size=1, max_size=30),
    budget=st.integers(0, 12),
    num_remaining=st.integers(1, 8),
)
def test_the_tree_is_the_likeliest_part_of_the_trie_behind_the_match_of_the_chain(
    config: SuffixConfig, branches: int, text: list[int], budget: int, num_remaining: int
) -> None:
    config = replace(config, branches=branches)
    budget = budget if config.branches > 1 else min(budget, num_remaining - 1)
    draft = tree_of(SuffixDrafter(config), row_of(text, max_new_tokens=num_remaining), budget)
    most = min(budget, config.num_speculative_tokens, num_remaining - 1)
    chain, length = by_definition(config, [], text, most)
    everything, drafted = trie(config, text, length, most) if chain else Paths(), paths_of(draft)
    assert set(drafted) <= set(everything)
    assert bool(drafted) == bool(chain)
    products = [everything[path] for path in drafted]
    assert products == sorted(products, reverse=True)
    for path, confidence in zip(drafted, draft.confidence or (), strict=True):
        assert confidence == behind(text, [*text[-length:], *path[:-1]])[path[-1]]
    if config.branches == 1:
        assert drafted == [tuple(chain[: depth + 1]) for depth in range(len(chain))]
    ends = [path for path in drafted if not any(other[:-1] == path for other in drafted)]
    if len(ends) < config.branches:  # nothing but the budget cut it, so the best are there
        assert products == pytest.approx(sorted(everything.values(), reverse=True)[:budget])
