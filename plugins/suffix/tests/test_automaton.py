"""The automaton, and matches in it, against counting by hand: what occurs how often, what follows, what ends where."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from emssd_suffix import SuffixConfig
from emssd_suffix.automaton import ROOT, SEPARATOR, SuffixAutomaton
from emssd_suffix.drafter import SuffixDrafter
from emssd_suffix.sources import OutputCache
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
        held = sum(automaton.num_tokens for automaton, _ in cache._generations)
        assert held == sum(map(len, generations)) <= max_tokens
    for length in range(1, 6):
        for output in outputs:
            matched = [match.length for match in cache.matches(f"row {output} {length}", output[:length])]
            assert matched == [
                next((n for n in range(min(5, length, len(output)), 0, -1) if places(text, output[:length][-n:])), 0)
                for text in generations
            ]


@pytest.mark.parametrize("text", [[7] * 600, [7, 8, 9] * 200], ids=["one token", "a loop"])
def test_a_text_that_loops_takes_a_state_for_each_token(text: list[int]) -> None:
    automaton = grown(text, [], 64)
    assert len(automaton.links) == len(text) + 1
    assert automaton.counts[automaton.edges[ROOT][7]] == text.count(7)


def test_the_end_of_a_remembered_output_is_no_token_of_a_tree() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_spec_factor=4.0, branches=4, cache_tokens=200, min_token_prob=0.0))
    for number, output in enumerate(([9, 3, 4], [9, 3, 5], [9, 3, 4])):
        row = replace(row_of([1], output, str(number)), finish_reason=FinishReason.LENGTH)
        drafter.observe(Outcome(Batch((row,)), Draft.empty(1), (range(0),), ((0,),)))
        drafter.release([str(number)])
    draft = tree_of(drafter, row_of([8, 9], name="b"), 99)
    assert paths_of(draft) == [(3,), (3, 4), (3, 5)]
    assert draft.confidence == (1.0, 2 / 3, 1 / 3)
