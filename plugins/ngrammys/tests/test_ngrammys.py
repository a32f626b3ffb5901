"""N-Grammys draft trees of the likeliest n-grams of the text and bigrams of the target."""

from __future__ import annotations

from itertools import product

import pytest
from emssd_ngrammys import NGrammysConfig, NGrammysDrafter

from emssd.drafting import Draft, Outcome
from emssd.drafting.growth import Tree
from emssd.sequences import Batch, Request, Row


def seen(drafter: NGrammysDrafter, row: Row, draft: Draft, candidates: list[list[int]]) -> None:
    """The target computed the newest token of `row` and a draft of which it took nothing."""
    drafter.observe(
        Outcome(
            batch=Batch([row]),
            draft=draft,
            accepted=((),),
            target_ids=(tuple(best[0] for best in candidates),),
            candidates=(tuple(map(tuple, candidates)),),
        )
    )


def tree_of(drafter: NGrammysDrafter, tokens: tuple[int, ...], name: str = "a", budget: int = 99) -> Tree:
    draft = drafter.propose(Batch([Row(Request(name, tokens, 64, frozenset()))]), [budget])
    return Tree(draft.token_ids.tolist(), list(draft.parents or ()), list(draft.confidence or ()))


def products(tree: Tree) -> dict[tuple[int, ...], float]:
    """The product of the confidences on each path."""
    ways, chances = list[tuple[int, ...]](), dict[tuple[int, ...], float]()
    for token, parent, sure in zip(*tree, strict=True):
        before = ways[parent] if parent >= 0 else ()
        ways.append((*before, token))
        chances[ways[-1]] = sure * (chances[before] if before else 1.0)
    return chances


def test_bigrams_and_ngrams_share_the_probability() -> None:
    drafter = NGrammysDrafter(NGrammysConfig(num_candidates=2, depth=1, bigram_share=0.4))
    row = Row(Request("a", (1, 2, 1, 3, 1), 64, frozenset()))
    draft = drafter.propose(Batch([row]), [9])
    assert draft.token_ids.tolist() == [3, 2]  # half each; the latest comes first
    seen(drafter, row, draft, [[7, 2], [8, 1], [9, 1]])
    assert products(tree_of(drafter, (1, 2, 1, 3, 1), "b")) == pytest.approx(
        {(2,): 0.6 * 0.5 + 0.4 * 0.25, (3,): 0.3, (7,): 0.4 * 0.5}
    )
    assert products(tree_of(drafter, (5, 3), "c")) == pytest.approx({(8,): 0.5, (1,): 0.25})  # the text says nothing
    assert products(tree_of(drafter, (5, 2), "d")) == pytest.approx({(9,): 0.5, (1,): 0.25})


def test_the_tree_has_the_likeliest_ways() -> None:
    drafter = NGrammysDrafter(NGrammysConfig(num_candidates=2, num_nodes=9, depth=3))
    table = {1: (2, 3), 2: (3, 1), 3: (1, 2)}
    drafter._bigrams = dict(table)
    drafted = products(tree_of(drafter, (4, 1)))
    likely = dict[tuple[int, ...], float]()
    for length in (1, 2, 3):
        for ranks in product((0, 1), repeat=length):
            way, chance = [1], 1.0
            for rank in ranks:
                way.append(table[way[-1]][rank])
                chance *= 0.5 ** (rank + 1)
            likely[tuple(way[1:])] = chance
    assert sorted(drafted.values()) == pytest.approx(sorted(sorted(likely.values(), reverse=True)[:9]))
    assert all(likely[way] == pytest.approx(chance) for way, chance in drafted.items())


def test_it_forgets_what_it_should() -> None:
    drafter = NGrammysDrafter(NGrammysConfig())
    drafter._bigrams = {1: (5,)}
    assert tree_of(drafter, (2, 1, 2)).token_ids[0] == 1
    drafter.release(["a"])
    assert tree_of(drafter, (3, 4, 2)).token_ids == []
    assert tree_of(drafter, (3, 4, 1), "b").token_ids == [5]
    drafter.reset()
    assert tree_of(drafter, (3, 4, 1), "c").token_ids == []


def test_it_learns_from_steps_in_which_it_was_not_asked() -> None:
    drafter = NGrammysDrafter(NGrammysConfig(num_candidates=2, depth=1))
    tree_of(drafter, (1, 2))
    for tokens in ((1, 2, 7), (1, 2, 7, 3, 3)):  # the target chose 7; then 3, and a drafter before this one was right
        seen(drafter, Row(Request("a", tokens, 64)), Draft.empty(1), [[tokens[2], 5]])
    assert set(products(tree_of(drafter, (9, 2), "b"))) == set(products(tree_of(drafter, (9, 7), "b"))) == {(7,), (5,)}
