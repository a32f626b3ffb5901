"""Trees of a draft model stay within all limits, and its cache never drifts. Oracle: a fresh drafter. float64."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_draft_model import DraftModelConfig
from emssd_testing.models import tiny_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.attention.trees import depths
from emssd.decoding.engine import Engine
from emssd.draft_models import StaticShape
from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from tests.support.draft_models import watch
from tests.support.draft_trees import (
    VOCAB_SIZE,
    children,
    draft_model,
    make_drafter,
    nodes,
    propose,
    same,
)
from tests.support.spies import failing
from tests.support.tiers import looped
from tests.support.trees import sequence

TOKENS = st.integers(3, VOCAB_SIZE - 1)
TREES = ["static", "dynamic", "sequoia"]
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # to explain a failure takes minutes


def observe(drafter: Drafter, rows: Seq[Row], draft: Draft, accepted: Seq[range] = ()) -> None:
    """Told of a step that extended `rows` already; of a tree, a draft model looks at nothing else."""
    with torch.inference_mode():
        drafter.observe(Outcome(Batch(tuple(rows)), draft, tuple(accepted) or ((),) * len(rows), ()))


@looped("kind", ["chain", *TREES])
@looped("length", [11, 13, 14, 15, 16, 17])
def test_nothing_is_drafted_or_computed_beyond_the_draft_models_length(kind: str, length: int) -> None:
    drafter = make_drafter(kind, draft_model("opt", max_model_len=16))
    computed = watch(drafter)
    draft = propose(drafter, [sequence([3] * length)], [14])
    assert max(depths(draft.tree(0)), default=0) <= max(0, 16 - length)
    assert (length < 16) == (draft.indptr[-1] > 0)
    assert max((max(packed.kv_lens) for packed in computed), default=0) <= 16


@pytest.mark.parametrize("kind", TREES)
def test_one_pass_a_level_computes_only_nodes_that_get_children(kind: str) -> None:
    drafter = make_drafter(kind)
    computed = watch(drafter)
    rows = [sequence([3, 4, 5], "a"), sequence([6], "b", 3), sequence([7, 8], "c")]
    draft = propose(drafter, rows, [14, 14, 2])
    assert len(computed) <= drafter.shape.depth
    assert computed[0].lengths == [3, 1, 2]  # the prompts
    for packed in computed[1:]:
        assert set(packed.request_ids) <= {"a", "b", "c"}
        assert "b" not in packed.request_ids or packed is computed[1], "its second level is its last"
    for name, tree in drafter._trees.items():
        lengths = [dict(zip(packed.request_ids, packed.lengths, strict=True)).get(name, 0) for packed in computed[1:]]
        assert sum(lengths) == len(tree.cached)
        assert max(lengths) <= tree.num_nodes, "what is not among the best can never be drafted"
        assert set(tree.cached) == set(tree.choices) - {-1} == set(tree.parents) - {-1}
    assert draft.lengths[2] == 2


def test_rows_that_the_cache_has_no_room_for_draft_nothing_in_that_step() -> None:
    drafter = make_drafter(StaticShape([2, 2]), max_tokens=48)  # six pages of four tokens with padded heads
    rows = [sequence([3] * 6, "a"), sequence([4] * 17, "b"), sequence([5] * 9, "c")]
    assert propose(drafter, rows, [6, 6, 6]).lengths == [6, 0, 6]  # 8 and 11 tokens of KV
    assert propose(drafter, rows, [6, 6, 6]).lengths == [6, 0, 6]  # again, as after a step that failed
    observe(drafter, rows, Draft.empty(3))
    drafter.release(["a", "c"])
    assert propose(drafter, rows[1:2], [6]).lengths == [6]


def test_a_pass_that_fails_leaves_no_tree_of_an_earlier_draft_behind() -> None:
    drafter, row = make_drafter(StaticShape([2, 2, 2])), sequence([3, 4, 5])
    propose(drafter, [row], [14])
    runner: Any = drafter._runner
    runner.run = failing(runner.run, RuntimeError("the third pass fails"), 2)
    with pytest.raises(RuntimeError, match="the third pass fails"):
        propose(drafter, [row], [5])
    assert drafter._trees == {}  # whose KV has been written over
    draft = propose(drafter, [row], [14])
    assert same(nodes(draft, 0), nodes(propose(make_drafter(StaticShape([2, 2, 2])), [row], [14]), 0))


class Recorded(StaticShape):
    """A shape that remembers what it is told of the target's choices."""

    def __init__(self, expansion: Seq[int]) -> None:
        super().__init__(expansion)
        self.told: list[list[int | None]] = []
        self.num_plans = 0

    def learn(self, ranks: Seq[int | None]) -> None:
        self.told.append(list(ranks))

    def replan(self) -> None:
        self.num_plans += 1


def test_it_learns_the_ranks_of_the_targets_choices_as_far_as_the_draft_model_went() -> None:
    shape, prompt = Recorded([2, 2]), [3, 4, 5]
    drafter = make_drafter(shape)
    (first, _), (second, _) = children(draft_model(), prompt, (), 2)
    below = [way[-1] for way, _ in children(draft_model(), prompt, second, 2)]
    other = next(token for token in range(VOCAB_SIZE) if token not in (first[0], second[0]))
    strange = next(token for token in range(VOCAB_SIZE) if token not in below)
    cases: list[tuple[list[int], list[int | None]]] = [
        ([*second, below[0], 3], [1, 0]),  # nothing is known of what lies after a leaf
        ([*second, below[1]], [1, 1]),  # the last is the target's own, whether it was drafted or not
        ([*second, strange], [1, None]),
        ([first[0]], [0]),
        ([other], [None]),
    ]
    rows = [sequence(prompt, name) for name in "abcde"]
    draft = propose(drafter, rows, [6, 6, 6, 6, 6])
    for row, (tokens, _) in zip(rows, cases, strict=True):
        row.extend(tokens)
    observe(drafter, rows, draft)
    assert shape.told == [ranks for _, ranks in cases]
    assert shape.num_plans == 1


@settings(max_examples=20, deadline=None, phases=PHASES)
@pytest.mark.parametrize("kind", ["chain", *TREES])
@given(data=st.data())
def test_after_any_acceptance_it_drafts_what_a_fresh_drafter_drafts(kind: str, data: st.DataObject) -> None:
    # With a sliding window it matters in which order the KV of an accepted way lies.
    model = draft_model("mistral")
    drafter = make_drafter(kind, model)
    running: list[Row] = []
    admitted = 0
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        while not running or (len(running) < 4 and data.draw(st.booleans(), "admit")):
            running.append(sequence(data.draw(st.lists(TOKENS, min_size=1, max_size=9), "prompt"), str(admitted)))
            admitted += 1
        budget = data.draw(st.lists(st.integers(0, 14), min_size=len(running), max_size=len(running)), "budget")
        draft = propose(drafter, running, budget)
        # A tree that learns its form, as Sequoia's does, has the same one.
        fresh = propose(make_drafter(kind if kind == "chain" else drafter.shape, model), running, budget)
        assert all(same(nodes(draft, row), nodes(fresh, row)) for row in range(len(running)))
        if data.draw(st.sampled_from([False, False, True]), "the step fails"):
            continue
        accepted = list[range]()
        for row, sequence_ in enumerate(running):
            way = data.draw(st.sampled_from([(), *(way for way, _ in nodes(draft, row))]), "accepted")
            sequence_.extend([*way, data.draw(TOKENS, "the target's own")])
            accepted.append(range(len(way)))
        observe(drafter, running, draft, accepted)
        for row in [row for row in running if data.draw(st.booleans(), "finished") or row.num_remaining < 5]:
            drafter.release([row.request_id])
            running.remove(row)
    drafter.release([row.request_id for row in running])
    assert drafter._cache.held == {}
    assert drafter._trees == {}
    assert drafter._runner.usage.held == 0


def test_where_the_draft_model_overflows_it_is_sure_of_nothing_and_other_rows_draft_what_they_would() -> None:
    drafter, alone = make_drafter(StaticShape([2, 2])), sequence([3, 4], "b")
    expected = nodes(propose(make_drafter(StaticShape([2, 2])), [alone], [6]), 0)
    runner: Any = drafter._runner
    run = runner.run

    def overflowing(packed: PackedInputs) -> Any:
        output = run(packed)
        output.logits[: len(output.logits) // 2] = torch.nan  # two rows with equally many nodes
        return output

    runner.run = overflowing
    draft = propose(drafter, [sequence([5, 6, 7], "a"), alone], [6, 6])
    assert {confidence for _, confidence in nodes(draft, 0)} == {0.0}
    assert same(nodes(draft, 1), expected)


@looped(
    ("options", "message"),
    [
        ({"tree": "static", "expansion": []}, r"drafter\.expansion is \[\]; give the number of children"),
        ({"tree": "dynamic", "acceptance": "x.json"}, r"drafter\.acceptance is set, but drafter\.tree is dynamic"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.from_model(tiny_model(), drafter=DraftModelConfig(**options))


def test_the_cache_that_a_tree_is_loaded_with_takes_trees() -> None:
    load_runner = Mock(side_effect=lambda path, **_: (make_drafter("chain")._runner, None))
    context = DrafterContext(VOCAB_SIZE, None, load_runner, lambda name, options: pytest.fail("asks for no other"))
    from emssd_draft_model import _build

    trees = _build(DraftModelConfig("small", tree="dynamic", num_nodes=7), context)  # type: ignore[arg-type]
    chain = _build(DraftModelConfig("small"), context)
    assert [call.kwargs["trees"] for call in load_runner.call_args_list] == [True, False]
    assert (trees.drafts_trees, trees.num_speculative_tokens) == (True, 7)
    assert (chain.drafts_trees, chain.num_speculative_tokens) == (False, 4)
