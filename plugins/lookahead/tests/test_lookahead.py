"""Lookahead decoding: the window moves as its definition says, and what comes out of it is verified like any draft."""

from __future__ import annotations

import pytest
from emssd_lookahead import LookaheadConfig
from emssd_lookahead.drafter import LookaheadDrafter, NGramPool, Window, merged
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Outcome
from emssd.model import TargetModel
from emssd.sequences import Batch, Request, Row
from tests.support.backends import BACKENDS, engine_of
from tests.support.tiers import looped
from tests.support.trees import paths

PROMPTS = [[1, 5, 6, 7, 5], [9], [3] * 20, [8, 2, 8]]


def ways_of(tree: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    return paths([token for token, _ in tree], tuple(parent for _, parent in tree))


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5), st.integers(0, 12), st.integers(0, 4))
def test_guesses_with_a_common_beginning_share_it(guesses: list[list[int]], num_nodes: int, depth: int) -> None:
    ways = ways_of(merged(guesses, num_nodes, depth))
    everything = dict.fromkeys(tuple(guess[: end + 1]) for guess in guesses for end in range(min(len(guess), depth)))
    assert ways == list(everything)[:num_nodes]


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(0, 99), min_size=1, max_size=9), st.data())
def test_the_window_is_a_chain_with_columns_below_and_moves_by_a_place(
    width: int, levels: int, text: list[int], data: st.DataObject
) -> None:
    window = Window(width, levels, text)
    for _ in range(3):
        ways = ways_of(window.tree())
        assert len(ways) == levels * width - 1
        spine, rest = [(), *ways[: width - 1]], ways[width - 1 :]
        assert [len(way) for way in spine] == list(range(width))
        for level in range(1, levels):
            for column in range(width):
                above = spine[column] if level == 1 else rest[(level - 2) * width + column]
                assert rest[(level - 1) * width + column][:-1] == above
        chosen = [data.draw(st.integers(100, 999)) for _ in range(width)]
        last = rest[-width:] if levels > 1 else spine
        grams = window.advance(1000, chosen)
        columns = enumerate(zip(last, chosen, strict=True))
        assert grams == [[*[1000, *way][column:], new] for column, (way, new) in columns]
        moved = [token for token, _ in window.tree()]
        assert moved[len(moved) - width :] == chosen if levels > 1 else moved == chosen[1:]


def test_a_pool_keeps_the_latest_ngrams_of_each_first_token() -> None:
    pool = NGramPool(3, 2)
    pool.add_all([1, 2, 3, 1, 4, 5, 1, 2, 3, 1, 6, 7])
    assert pool.after(1) == [(6, 7), (2, 3)]
    pool.add([1, 2, 3])
    assert pool.after(1) == [(2, 3), (6, 7)]
    assert pool.after(6) == []


@looped("shape", [(3, 3), (1, 2), (4, 2), (2, 4)])
def test_an_ngram_of_the_window_ends_with_what_the_target_says_behind_it(shape: tuple[int, int]) -> None:
    model = tiny_model(max_model_len=64)
    width, ngram = shape
    texts: list[list[int]] = [PROMPTS[0]]
    checked = 0

    class Watched(LookaheadDrafter):
        def observe(self, outcome: Outcome) -> None:
            nonlocal checked
            window, advance = self._rows["0"].window, self._rows["0"].window.advance

            def advanced(newest: int, chosen: list[int]) -> list[list[int]]:
                nonlocal checked
                assert newest == texts[-1][-1]
                ways = [(), *ways_of(window.tree())][-width:] if ngram > 2 else [(), *ways_of(window.tree())]
                for way, token in zip(ways, chosen, strict=True):
                    assert [token] == greedy_reference(model, [*texts[-1], *way], 1)
                    checked += 1
                return advance(newest, chosen)

            window.advance = advanced
            super().observe(outcome)
            window.advance = advance
            texts.append(list(outcome.batch.rows[0].tokens))

    drafter = Watched(LookaheadConfig(width, ngram, 2))
    engine_of(TargetModel(model), drafter, BACKENDS["paged-grows"]()).generate(PROMPTS[:1], 24, ignore_eos=True)
    assert checked >= 8 * width


def sequence(*tokens: int, max_new_tokens: int = 50) -> Row:
    return Row(Request("a", tokens, max_new_tokens))


def test_guesses_come_first_and_the_window_only_where_all_of_it_has_room() -> None:
    config = LookaheadConfig(window=3, ngram=3, guesses=2)
    row = sequence(1, 2, 3, 1, 4, 5, 1)
    whole = LookaheadDrafter(config).propose(Batch((row,)), [9])
    assert whole.token_ids[:4].tolist() == [4, 5, 2, 3]
    assert whole.lengths == [9]
    for budget, length in ((8, 8), (5, 5), (4, 4)):  # the window has 5 nodes
        tree = LookaheadDrafter(config).propose(Batch((row,)), [budget])
        assert tree.lengths == [length]
    short = sequence(1, 2, 3, 1, 4, 5, 1, max_new_tokens=3)
    assert LookaheadDrafter(config).propose(Batch((short,)), [9]).token_ids.tolist() == [4, 5, 2, 3]


@pytest.mark.parametrize("verified", [0, 4, 8])
def test_a_window_that_was_cut_stands_still(verified: int) -> None:
    drafter, row = LookaheadDrafter(LookaheadConfig(3, 3, 2)), sequence(1, 2, 3, 1, 4, 5, 1)
    draft = drafter.propose(Batch((row,)), [9])
    before = drafter._rows["a"].window.tree()
    drafter.observe(Outcome(Batch((row,)), draft.cut([verified]), ((),), (list(range(verified + 1)),)))
    assert drafter._rows["a"].window.tree() == before
    draft = drafter.propose(Batch((row,)), [9])
    drafter.observe(Outcome(Batch((row,)), draft, ((),), (list(range(10)),)))
    assert drafter._rows["a"].window.tree() != before


def test_without_the_prompt_the_pool_begins_empty() -> None:
    drafter = LookaheadDrafter(LookaheadConfig(3, 3, 2, prompt_pool=False))
    assert drafter.propose(Batch((sequence(1, 2, 3, 1, 4, 5, 1),)), [4]).lengths == [0]
