"""Token recycling drafts from the target's own candidates, the likeliest first."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import product

import pytest
import torch
from emssd_testing.models import tiny_model
from emssd_token_recycling import TokenRecyclingConfig, TokenRecyclingDrafter, grow
from hypothesis import example, given
from hypothesis import strategies as st

from emssd.drafting import Draft, Outcome
from emssd.model import TargetModel
from emssd.sequences import Batch, Request, Row
from tests.support.backends import BACKENDS, engine_of
from tests.support.trees import paths

SHARES = [0.5, 0.3, 0.1]
PROMPTS = [[1, 5, 6, 7, 5], [9], [3] * 20, [8, 2, 8]]


@given(
    st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 4), min_size=3, max_size=3, unique=True)),
    st.integers(0, 12),
    st.integers(0, 3),
)
@example({token: [0, 1, 2] for token in range(5)}, 12, 3)
def test_the_tree_has_the_likeliest_ways_over_the_table_the_likeliest_first(
    table: dict[int, list[int]], num_nodes: int, depth: int
) -> None:
    tree = grow(table, 0, SHARES, num_nodes, depth)
    ways = paths(tree.token_ids, tree.parents)
    likely: dict[tuple[int, ...], float] = {}
    for length in range(1, depth + 1):
        for ranks in product(range(3), repeat=length):
            way = [0]
            while way[-1] in table and len(way) <= length:
                way.append(table[way[-1]][ranks[len(way) - 1]])
            if len(way) > length:
                likely[tuple(way[1:])] = math.prod(SHARES[rank] for rank in ranks)
    assert len(ways) == len(set(ways)) == min(num_nodes, len(likely))
    assert set(ways) <= set(likely)
    assert [likely[way] for way in ways] == pytest.approx(sorted(likely.values(), reverse=True)[: len(ways)])


def test_the_table_holds_what_the_target_considers_behind_every_token_of_a_step() -> None:
    model = tiny_model(max_model_len=64)
    best: dict[int, list[int]] = {}

    class Watched(TokenRecyclingDrafter):
        def observe(self, outcome: Outcome) -> None:
            for number, row in enumerate(outcome.batch):
                before = before_of[row.request_id]
                for way in [(), *paths(outcome.draft.tokens(number), outcome.draft.tree(number))]:
                    logits = model(torch.tensor([[*before, *way]])).logits[0, -1]
                    best[way[-1] if way else before[-1]] = logits.topk(3).indices.tolist()
                before_of[row.request_id] = list(row.tokens)
            super().observe(outcome)
            assert {token: self._table[token] for token in best} == best

    before_of = {"0": PROMPTS[0]}
    watched = Watched(TokenRecyclingConfig(num_candidates=3, num_nodes=6, depth=3))
    engine_of(TargetModel(model), watched, BACKENDS["paged-grows"]()).generate(PROMPTS[:1], 20, ignore_eos=True)
    assert len(best) > 3


def outcome_of(drafter: TokenRecyclingDrafter, row: Row, targets: Seq[int], candidates: Seq[Seq[int]]) -> Outcome:
    batch = Batch((row,))
    drafter.propose(batch, [0])
    return Outcome(batch, Draft.empty(1), ((),), (targets,), (candidates,))


def test_ranks_count_by_how_often_the_target_takes_them() -> None:
    drafter = TokenRecyclingDrafter(TokenRecyclingConfig(num_candidates=2, num_nodes=2))
    row = Row(Request("a", (1, 2, 3), 9))
    before = drafter._shares()
    drafter.observe(outcome_of(drafter, row, [7], [[7, 8]]))
    assert drafter._shares() == before, "nothing was known behind 3"
    drafter.observe(outcome_of(drafter, row, [8], [[8, 7]]))
    first, second = drafter._shares()
    assert first < before[0]
    assert second > before[1]
    assert drafter.propose(Batch((row,)), [2]).token_ids.tolist() == [8, 7]
    assert drafter.propose(Batch((row,)), [2]).confidence == (first, second)
    drafter.reset()
    assert drafter._shares() == before
    assert not drafter.propose(Batch((row,)), [2]).token_ids.numel()


def test_it_learns_from_steps_in_which_it_was_not_asked() -> None:
    drafter = TokenRecyclingDrafter(TokenRecyclingConfig(num_candidates=2, depth=1))
    drafter.propose(Batch((Row(Request("a", (1, 2), 9)),)), [2])
    for tokens in ((1, 2, 7), (1, 2, 7, 3, 3)):  # the target chose 7; then 3, and a drafter before this one was right
        row = Row(Request("a", tokens, 9))
        drafter.observe(Outcome(Batch((row,)), Draft.empty(1), ((),), ((tokens[2],),), (((tokens[2], 5),),)))
    for last in (2, 7):
        asked = Row(Request("b", (9, last), 9))
        assert drafter.propose(Batch((asked,)), [2]).token_ids.tolist() == [7, 5]
