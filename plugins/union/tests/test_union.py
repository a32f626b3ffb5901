"""Every drafter hears what would have become of its own draft alone.

Oracle: `verify` of its draft alone, for a target whose choice is a function of the path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from unittest.mock import Mock, call
from zlib import crc32

import pytest
import torch
from emssd_testing.models import tiny_model
from emssd_union import UnionConfig, emssd_drafters
from emssd_union.drafter import UnionDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.decoding.engine import Engine
from emssd.decoding.verify import verify
from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.drafting.checked import CheckedDrafter
from emssd.errors import ConfigError, PluginError, PluginWarning
from emssd.sequences import Batch
from tests.support.tiers import looped
from tests.support.told_drafter import Told
from tests.support.trees import paths_of, row_of, tree_of

VOCAB_SIZE = 11


def union(*drafters: Drafter, on_error: str = "fail") -> UnionDrafter:
    return UnionDrafter([CheckedDrafter(drafter, None, VOCAB_SIZE, on_error=on_error) for drafter in drafters])


def chains(*rows: list[int]) -> Draft:
    return Draft.from_chains(rows)


@st.composite
def drafts(draw: st.DrawFn, num_rows: int) -> Draft:
    """Chains or trees of two letters, with confidence or without."""
    tokens = [draw(st.lists(st.integers(3, 4), max_size=6)) for _ in range(num_rows)]
    draft = Draft.from_chains(tokens)
    if draw(st.booleans()):
        trees = [[(token, draw(st.integers(-1, node - 1))) for node, token in enumerate(row)] for row in tokens]
        draft = Draft.from_trees(trees)
    if draw(st.booleans()):
        return draft
    return replace(draft, confidence=tuple(draw(st.sampled_from([0.2, 0.5, 1.0])) for _ in range(draft.indptr[-1])))


def verified(batch: Batch, draft: Draft, seed: int) -> Outcome:
    """Return the outcome of `draft` with a target whose choice hangs on the way to a node and on nothing else."""
    chosen = []
    for row, sequence in enumerate(batch):
        for path in [(), *paths_of(draft, row)]:
            chosen.append(3 + crc32(repr((seed, sequence.request_id, path)).encode()) % 2)
    rows = verify(torch.tensor(chosen), batch.rows, draft)
    accepted, targets = ([getattr(row, name) for row in rows] for name in ("accepted", "target_ids"))
    return Outcome(batch, draft, tuple(accepted), tuple(targets))


@given(
    told=st.integers(1, 3).flatmap(lambda rows: st.lists(drafts(rows), min_size=1, max_size=3)),
    budgets=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    remaining=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    kept=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    max_depth=st.sampled_from([None, None, 1, 2, 4]),
    seed=st.integers(0, 999),
)
def test_each_drafter_hears_what_verifying_its_own_draft_would_have_told(
    told: list[Draft], budgets: list[int], remaining: list[int], kept: list[int], max_depth: int | None, seed: int
) -> None:
    drafters = [Told(draft) for draft in told]
    names, whole = range(told[0].num_rows), union(*drafters)
    batch = Batch(tuple(row_of([1], name=str(row), max_new_tokens=remaining[row]) for row in names))
    budget = [budgets[row] for row in names]
    draft = whole.propose(batch, budget)
    draft.check(batch, budget, VOCAB_SIZE, trees=True)
    offered = list(whole._proposed)
    if max_depth is not None:
        draft = draft.shallow([max_depth] * len(names))
    draft = draft.cut([min(length, kept[row]) for row, length in enumerate(draft.lengths)])
    whole.observe(verified(batch, draft, seed))
    left = [set(paths_of(draft, row)) for row in names]
    for drafter, proposed in zip(drafters, offered, strict=True):
        (heard,) = drafter.outcomes
        assert heard.batch is batch
        for row in names:
            there = [path in left[row] for path in paths_of(proposed, row)]
            assert heard.draft.lengths[row] == (there.index(False) if False in there else len(there))
        expected = verified(batch, proposed.cut(heard.draft.lengths), seed)
        assert torch.equal(heard.draft.token_ids, expected.draft.token_ids)
        assert heard.draft.parents == expected.draft.parents
        assert [list(nodes) for nodes in heard.accepted] == [list(nodes) for nodes in expected.accepted]
        assert [list(ids) for ids in heard.target_ids] == [list(ids) for ids in expected.target_ids]


def test_a_chain_drafter_gets_no_budget_beyond_the_end_of_a_row_and_none_beyond_its_own_most() -> None:
    one, many = Told(chains([3] * 9)), Told(Draft.from_trees([[(4, -1)] * 9]), most=5)
    whole = union(one, many)
    draft = tree_of(whole, row_of([1], max_new_tokens=4), 8)
    assert one.budgets == [[3]]
    assert many.budgets == [[5]]
    assert paths_of(draft) == [(3,), (4,), (3, 3), (3, 3, 3)]
    assert [drafted.lengths for drafted in whole._proposed] == [[3], [5]]


class Raising(Told):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(chains([5, 5]))
        self.where = where

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if self.where == "propose":
            raise ZeroDivisionError("of its own")
        return super().propose(batch, budget) if self.where != "vocabulary" else chains([VOCAB_SIZE])

    def observe(self, outcome: Outcome) -> None:
        raise ZeroDivisionError("of its own")


@pytest.mark.parametrize("where", ["propose", "vocabulary", "observe"])
def test_a_drafter_that_fails_is_switched_off_alone(where: str) -> None:
    good, bad, batch = Told(chains([3, 4])), Raising(where), Batch((row_of([1]),))
    whole = union(bad, good, on_error="disable")
    with pytest.warns(PluginWarning, match=r"drafter Raising (failed in|broke its interface).*switched off"):
        whole.observe(verified(batch, whole.propose(batch, [9]), 0))
    assert paths_of(whole.propose(batch, [9])) == [(3,), (3, 4)]
    assert whole.num_speculative_tokens == 9
    assert len(good.outcomes) == 1
    whole.release(["a"])
    assert good.released == bad.released == ["a"]


@looped("where", ["propose", "vocabulary", "observe"])
@looped("is_first", [True, False])
def test_or_ends_the_run_and_the_others_hear_of_the_step_all_the_same(where: str, is_first: bool) -> None:
    good, bad, batch = Told(chains([3, 4])), Raising(where), Batch((row_of([1]),))
    whole = union(bad, good) if is_first else union(good, bad)
    with pytest.raises(PluginError, match=r"drafter Raising (failed in|broke its interface)"):
        whole.observe(verified(batch, whole.propose(batch, [9]), 0))
    assert len(good.outcomes) == (where == "observe")


def test_a_replay_among_them_makes_it_a_replay() -> None:
    replay = Told(chains([3]))
    replay.replays = "acceptance drawn"
    assert union(Told(chains([3]))).replays is None
    assert union(Told(chains([3])), replay).replays == "acceptance drawn"


def test_drafters_in_turn_are_none_that_can_be_merged() -> None:
    config = UnionConfig(["suffix", "cascade"], {"cascade": {"drafters": ["llma", "pld"]}})
    with pytest.raises(ConfigError, match=r"'cascade' is several drafters, which are asked in turn; name these"):
        Engine.from_model(tiny_model("llama"), drafter=config)


def test_drafters_are_made_in_order_each_with_its_own_options_and_fail_as_the_engines_do() -> None:
    make_drafter = Mock(side_effect=lambda *_: Raising("propose"))
    context = DrafterContext(VOCAB_SIZE, None, lambda path: pytest.fail("no model"), make_drafter, "fail")
    (spec,) = emssd_drafters()
    drafter = spec.build(UnionConfig(["x", "y"], {"y": {"length": 3}}), context)
    assert make_drafter.call_args_list == [call("x", {}), call("y", {"length": 3})]
    with pytest.raises(PluginError, match="drafter 'x' of union failed in propose"):
        drafter.propose(Batch((row_of([1]),)), [9])


def test_all_are_told_to_forget_and_to_begin_anew() -> None:
    both = [Told(chains([])), Told(chains([]))]
    union(*both).release(iter(["a", "never seen"]))
    union(*both).reset()
    assert [(drafter.released, drafter.num_resets) for drafter in both] == [(["a", "never seen"], 1)] * 2
