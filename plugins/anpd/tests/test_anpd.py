"""ANPD drafts, token by token, what followed the longest n-gram before most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from emssd_anpd import ANPDConfig, ANPDDrafter
from hypothesis import example, given
from hypothesis import strategies as st

from emssd.drafting import Draft, Outcome
from emssd.errors import ConfigError
from emssd.sequences import Batch, Request, Row

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def naive(tokens: list[int], longest: int, shortest: int, length: int) -> list[tuple[int, float]]:
    """The same draft by a search of the whole text for each token."""
    drafted = list[tuple[int, float]]()
    while len(drafted) < length:
        end = [*tokens, *(token for token, _ in drafted)]
        for size in range(min(longest, len(end)), shortest - 1, -1):
            places = [index for index in range(size, len(tokens)) if tokens[index - size : index] == end[-size:]]
            if places:
                break
        else:
            break
        counts = Counter(tokens[index] for index in places)
        token = max(counts, key=lambda token: (counts[token], max(at for at in places if tokens[at] == token)))
        drafted.append((token, counts[token] / len(places)))
    return drafted


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
    assert not drafter._texts


def test_a_row_that_comes_again_begins_anew() -> None:
    drafter = ANPDDrafter(ANPDConfig())
    assert drafted(drafter, Row(Request("a", (1, 2, 1), 8, frozenset())), 2) == [(2, 1.0), (1, 1.0)]
    drafter.release(["a"])
    assert drafted(drafter, Row(Request("a", (3, 4, 1), 8, frozenset())), 2) == []


GROUP = ANPDConfig(group_tokens=64)


def row_of(prompt: list[int], output: Iterable[int], name: str) -> Row:
    row = Row(Request(name, tuple(prompt), 64, frozenset()))
    row.extend([*output])
    return row


def seen(drafter: ANPDDrafter, *rows: Row) -> None:
    """A step was verified, in which `rows` grew to what they are."""
    drafter.observe(Outcome(Batch(rows), Draft.empty(len(rows)), ((),) * len(rows), ()))


def first(drafter: ANPDDrafter, row: Row) -> list[int]:
    return [token for token, _ in drafted(drafter, row, 1)]


def test_a_group_drafts_from_its_samples_while_they_grow_and_from_earlier_epochs_and_other_prompts_do_not() -> None:
    drafter, ahead = ANPDDrafter(GROUP), row_of([1, 2], [5, 6, 7], "ahead")
    seen(drafter, ahead)
    assert first(drafter, row_of([1, 2], [5], "behind")) == [6]
    assert first(drafter, row_of([3, 2], [5], "another prompt")) == []
    assert first(drafter, row_of([1, 2], [6, 7], "at the end")) == []
    ahead.extend([8])
    seen(drafter, ahead)
    assert first(drafter, row_of([1, 2], [6, 7], "later")) == [8]
    drafter.release(["ahead"])
    assert first(drafter, row_of([1, 2], [6, 7], "next epoch")) == [8]
    drafter.reset()
    assert first(drafter, row_of([1, 2], [6, 7], "anew")) == []


def test_the_outputs_of_a_group_are_counted_with_a_rows_own_text() -> None:
    drafter = ANPDDrafter(ANPDConfig(max_ngram_size=2, group_tokens=64))
    seen(drafter, row_of([9], [1, 2, 3], "a"), row_of([9], [4, 2, 5], "b"), row_of([9], [6, 2, 5], "c"))
    assert drafted(drafter, row_of([9], [1, 2], "d"), 1) == [(3, 1.0)]  # the longest n-gram decides
    assert drafted(drafter, row_of([9], [2, 3, 7, 2], "e"), 1) == [(3, 1 / 2)]  # [2] before 3 twice, the latest


def test_a_preempted_row_is_remembered_once_and_another_of_its_name_anew() -> None:
    drafter, row = ANPDDrafter(GROUP), row_of([1], [5, 6], "a")
    seen(drafter, row)
    drafter.release(["a"])  # it lost its KV, and comes again
    row.extend([7])
    seen(drafter, row)
    assert drafter._num_remembered == 3
    assert drafter._groups[1,].counts.after((5,)) == {6: 1}
    drafter.release(["a"])  # it was given up
    seen(drafter, row_of([1], [5], "a"))
    assert drafter._num_remembered == 4


def test_the_prompts_that_were_decoded_longest_ago_are_forgotten_first() -> None:
    drafter = ANPDDrafter(GROUP)
    for number, prompt in enumerate((1, 2, 1, 3)):
        seen(drafter, row_of([prompt], range(10, 30), str(number)))
        assert drafter._num_remembered == sum(text.counts.num_tokens for text in drafter._groups.values()) <= 64
    assert [first(drafter, row_of([prompt], [10], f"new {prompt}")) for prompt in (1, 2, 3)] == [[11], [], [11]]


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.min_ngram_size is 5; it must be at most drafter\.max_ngram_"):
        ANPDDrafter(ANPDConfig(min_ngram_size=5))
