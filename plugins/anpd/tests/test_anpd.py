"""ANPD drafts, token by token, what followed the longest n-gram before most often."""

from __future__ import annotations

from collections import Counter

import pytest
from emssd_anpd import ANPDConfig
from emssd_anpd.drafter import ANPDDrafter
from hypothesis import example, given
from hypothesis import strategies as st

from emssd.drafting.lookup import NGramCounts
from emssd.errors import ConfigError
from emssd.sequences import Batch, Request, Row

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def naive(tokens: list[int], longest: int, shortest: int, length: int) -> list[tuple[int, float]]:
    """The same draft by a search of the whole text for each token."""
    found = list[tuple[int, float]]()
    while len(found) < length:
        end = [*tokens, *(token for token, _ in found)]
        for size in range(min(longest, len(end)), shortest - 1, -1):
            places = [place for place in range(size, len(tokens)) if tokens[place - size : place] == end[-size:]]
            if places:
                break
        else:
            break
        counts = Counter(tokens[place] for place in places)
        token = max(counts, key=lambda each: (counts[each], max(at for at in places if tokens[at] == each)))
        found.append((token, counts[token] / len(places)))
    return found


def drafted(drafter: ANPDDrafter, row: Row, budget: int) -> list[tuple[int, float]]:
    draft = drafter.propose(Batch([row]), [budget])
    assert draft.parents is None
    return list(zip(draft.token_ids.tolist(), draft.confidence or (), strict=True))


@given(TEXTS, st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6))
@example([0, 1, 0, 2, 0], [], 1, 1, 3)  # a tie, which the latest wins
def test_it_drafts_what_a_search_of_the_whole_text_finds(
    prompt: list[int], output: list[int], longest: int, shortest: int, budget: int
) -> None:
    config = ANPDConfig(max_ngram_size=max(longest, shortest), min_ngram_size=shortest, num_speculative_tokens=5)
    drafter, row = ANPDDrafter(config), Row(Request("a", tuple(prompt), 64, frozenset()))
    for token in [None, *output]:
        if token is not None:
            row.extend([token])
        wanted = naive(list(row.tokens), config.max_ngram_size, shortest, min(budget, 5))
        assert dict(enumerate(drafted(drafter, row, budget))) == dict(enumerate(wanted))
    drafter.release(["a", "unknown"])
    assert not drafter._counts


def test_a_row_that_comes_again_begins_anew() -> None:
    drafter = ANPDDrafter(ANPDConfig())
    assert drafted(drafter, Row(Request("a", (1, 2, 1), 8, frozenset())), 2) == [(2, 1.0), (1, 1.0)]
    drafter.release(["a"])
    assert drafted(drafter, Row(Request("a", (3, 4, 1), 8, frozenset())), 2) == []


def test_counts_know_the_longest_ngram_that_was_followed() -> None:
    counts = NGramCounts(2)
    counts.extend([1, 2, 3, 1, 2])
    assert counts.after([9, 2]) == {3: 1}
    assert counts.after([1, 2], min_size=2) == {3: 1}
    assert counts.after([9, 2], min_size=2) == {}
    counts.extend([1, 2, 3, 1, 2, 4, 2, 3])
    assert list(counts.after([9, 2]).items()) == [(4, 1), (3, 2)]


@pytest.mark.parametrize("options", [{"max_ngram_size": 0}, {"min_ngram_size": 5}, {"num_speculative_tokens": 0}])
def test_options_that_cannot_be_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1, and the second at least the first"):
        ANPDDrafter(ANPDConfig(**options))
