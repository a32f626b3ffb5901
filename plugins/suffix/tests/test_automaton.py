"""The automaton, and matches in it, against counting by hand: what occurs how often, what follows, what ends where."""

from __future__ import annotations

from itertools import pairwise

import pytest
from emssd_suffix.automaton import ROOT, SEPARATOR, SuffixAutomaton
from emssd_suffix.sources import Matcher, OutputCache
from hypothesis import given
from hypothesis import strategies as st

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
