"""The automaton, and matches in it, against counting by hand: what occurs how often, what follows, what ends where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise

import pytest
from emssd_suffix import SuffixConfig
from emssd_suffix.automaton import ROOT, SEPARATOR, SuffixAutomaton
from emssd_suffix.drafter import SuffixDrafter
from emssd_suffix.sources import Matcher, OutputCache
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft, Outcome
from emssd.sequences import Batch, FinishReason
from tests.support.trees import paths_of, row_of, tree_of

LETTERS = st.integers(3, 5) | st.integers(3, 40)  # few: repeats everywhere; many: states with a single string
TEXTS = st.lists(LETTERS, max_size=40) | st.lists(st.just(3), max_size=30)
CUTS = st.lists(st.integers(0, 40), max_size=4)
DEPTHS = st.integers(2, 9)


def places(text: list[int], string: list[int]) -> list[int]:
    """Ends of `string` in `text`."""
    size = len(string)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == string]


def favourite(text: list[int], string: list[int]) -> int:
    """The token that follows `string` most often in `text`, of equals the one that did so last; -1 for none."""
    followers = [text[end] for end in places(text, string) if end < len(text) and text[end] != SEPARATOR]
    latest = {token: i for i, token in enumerate(followers)}
    return max(latest, key=lambda token: (followers.count(token), latest[token]), default=-1)


def grown(text: list[int], cuts: list[int], depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(depth)
    for start, stop in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        automaton.extend(text[start:stop])
    return automaton


def state_of(automaton: SuffixAutomaton, string: list[int]) -> int | None:
    state: int | None = ROOT
    for token in string:
        state = None if state is None else automaton.edges[state].get(token)
    return state


@given(text=TEXTS, cuts=CUTS, depth=DEPTHS)
def test_it_holds_the_strings_of_the_text_with_their_counts_and_what_follows(
    text: list[int], cuts: list[int], depth: int
) -> None:
    automaton = grown(text, cuts, depth)
    assert automaton.num_tokens == len(text)
    assert len(automaton.links) <= max(2 * len(text), 1)  # Blumer et al.: linear, whatever the text
    strings = {tuple(text[start:stop]) for start in range(len(text)) for stop in range(start + 1, len(text) + 1)}
    for string in map(list, strings):
        state = state_of(automaton, string)
        assert state is not None
        if len(string) <= depth:
            assert automaton.counts[state] == len(places(text, string))
        if len(string) < depth:
            assert automaton.favourites[state] == favourite(text, string)
        for other in (3, 4, 99):
            assert (state_of(automaton, [*string, other]) is not None) == ((*string, other) in strings)


@given(text=TEXTS, cuts=CUTS, depth=DEPTHS, max_length=st.integers(1, 8))
def test_ends_of_the_text_that_occur_elsewhere(text: list[int], cuts: list[int], depth: int, max_length: int) -> None:
    automaton, max_length = grown(text, cuts, depth), min(max_length, depth - 1)
    expected: list[tuple[int, int]] = []
    known: list[list[int]] = []
    for length in range(min(max_length, len(text)), 0, -1):
        found = places(text, text[-length:])
        if len(found) > 1 and found not in known:  # of strings that end at the same places, the longest
            known.append(found)
            expected.append((length, len(found)))
    repeated, ends = automaton.repeated(max_length)
    assert [(length, automaton.counts[state]) for state, length in repeated] == expected
    assert [state for state, _ in repeated] == [state_of(automaton, text[len(text) - n :]) for n, _ in expected]
    lengths = range(1, min(depth - 1, len(text)) + 1)
    assert ends == {state_of(automaton, text[-length:]) for length in lengths}


@given(text=TEXTS, more=TEXTS, row=TEXTS, cuts=CUTS, max_length=st.integers(1, 8))
def test_a_matcher_follows_the_longest_end_of_a_row_that_a_growing_text_holds(
    text: list[int], more: list[int], row: list[int], cuts: list[int], max_length: int
) -> None:
    automaton = grown(text, [], max_length + 1)
    matcher = Matcher(automaton, max_length)
    stops = [*sorted(cuts), len(row)]
    for i, stop in enumerate(stops):
        if i == len(stops) // 2:
            automaton.extend([SEPARATOR, *more])
            text = [*text, SEPARATOR, *more]
        tokens = row[:stop]
        lengths = range(min(max_length, len(tokens)), 0, -1)
        expected = next((length for length in lengths if places(text, tokens[-length:])), 0)
        match = matcher.match(tokens)
        assert match.length == expected
        for state, length in match.suffixes:
            assert state_of(automaton, tokens[len(tokens) - length :]) == state
            assert automaton.counts[state] == len(places(text, tokens[-length:]))


@given(outputs=st.lists(st.lists(LETTERS, min_size=1, max_size=20), max_size=20), max_tokens=st.integers(4, 40))
def test_the_cache_is_bounded_and_forgets_the_older_half(outputs: list[list[int]], max_tokens: int) -> None:
    cache = OutputCache(max_tokens, 6, 5)
    generations: list[list[int]] = []
    for i, output in enumerate(outputs):
        cache.matches(str(i), output)  # rows that are matched are no part of what it holds
        cache.add(output)
        text = [*output[1 - max_tokens // 2 :], SEPARATOR]
        if generations and len(generations[0]) + len(text) <= max_tokens // 2:
            generations[0] += text
        else:
            generations = [list(text), *generations[:1]]
        assert cache.num_tokens == sum(map(len, generations)) <= max_tokens
    for length in range(1, 6):
        for output in outputs:
            found = [match.length for match in cache.matches(f"row {output} {length}", output[:length])]
            assert found == [
                next((n for n in range(min(5, length, len(output)), 0, -1) if places(text, output[:length][-n:])), 0)
                for text in generations
            ]


def test_a_row_that_is_released_is_forgotten_by_the_cache() -> None:
    cache = OutputCache(40, 6, 5)
    cache.add([3, 4, 5])
    assert [match.length for match in cache.matches("a", [9, 3, 4])] == [2]
    cache.release("a")
    cache.release("never seen")
    assert [match.length for match in cache.matches("a", [5])] == [1]


@pytest.mark.parametrize("text", [[7] * 600, [7, 8, 9] * 200], ids=["one token", "a loop"])
def test_a_text_that_loops_takes_a_state_for_each_token(text: list[int]) -> None:
    automaton = grown(text, [], 64)
    assert len(automaton.links) == len(text) + 1
    assert automaton.counts[automaton.edges[ROOT][7]] == text.count(7)


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


def test_the_end_of_a_remembered_output_is_no_token_of_a_tree() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_spec_factor=4.0, branches=4, cache_tokens=200, min_token_prob=0.0))
    for number, output in enumerate(([9, 3, 4], [9, 3, 5], [9, 3, 4])):
        row = replace(row_of([1], output, str(number)), finish_reason=FinishReason.LENGTH)
        drafter.observe(Outcome(Batch((row,)), Draft.empty(1), (range(0),), ((0,),)))
        drafter.release([str(number)])
    draft = tree_of(drafter, row_of([8, 9], name="b"), 99)
    assert paths_of(draft) == [(3,), (3, 4), (3, 5)]
    assert draft.confidence == (1.0, 2 / 3, 1 / 3)
