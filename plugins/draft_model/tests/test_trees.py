"""Trees of a draft model: the tree that each paper describes, within all limits, and a cache that never drifts.

Oracles: the draft model itself without a cache; a fresh drafter; greedy decoding. float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from emssd_draft_model import DraftModelConfig
from emssd_draft_model.sequoia import SequoiaShape
from emssd_testing.models import tiny_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, PackedInputs, PagedBackend
from emssd.attention.trees import depths
from emssd.decoding.engine import Engine
from emssd.draft_models import ModelDrafter, StaticShape
from emssd.draft_models.shapes import DynamicShape, Shape
from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.errors import ConfigError
from emssd.model import CausalLMRunner, TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Batch, Request, Row
from tests.support.draft_models import draft_model_drafter, watch
from tests.support.reference_kernels import ReferenceKernels
from tests.support.tiers import looped
from tests.support.trees import paths_of

VOCAB_SIZE = 11
TOKENS = st.integers(3, VOCAB_SIZE - 1)
TREES = ["static", "dynamic", "sequoia"]
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # to explain a failure takes minutes


@cache
def draft_model(architecture: str = "llama", max_model_len: int = 64) -> TargetModel:
    return TargetModel(tiny_model(architecture, seed=3, vocab_size=VOCAB_SIZE, max_model_len=max_model_len))


def backend_for(model: TargetModel, page_size: int = 4, max_tokens: int | None = None) -> AttentionBackend:
    backend = PagedBackend(ReferenceKernels(head_dims=(8,)), page_size=page_size)
    backend.allocate(replace(model.kv_cache_spec(5), max_tokens=max_tokens, trees=True))
    return backend


def make_drafter(shape: Shape, model: TargetModel | None = None, max_tokens: int | None = None) -> ModelDrafter:
    model = model or draft_model()
    return ModelDrafter(CausalLMRunner(model, backend_for(model, max_tokens=max_tokens)), VOCAB_SIZE, shape)


def sequence(tokens: list[int], name: str = "a", max_new_tokens: int = 40) -> Row:
    return Row(Request(name, tuple(tokens), max_new_tokens))


Node = tuple[tuple[int, ...], float]
"""The tokens on the way to a node, and how probable the draft model finds it after its parent."""


def nodes(draft: Draft, row: int) -> list[Node]:
    sure = draft.confidence or (1.0,) * len(draft.token_ids)  # chains that stay on the device tell none
    return list(zip(paths_of(draft, row), sure[draft.indptr[row] :], strict=False))


def same(left: list[Node], right: list[Node]) -> bool:
    return [way for way, _ in left] == [way for way, _ in right] and all(
        math.isclose(mine, theirs, rel_tol=1e-9) for (_, mine), (_, theirs) in zip(left, right, strict=True)
    )


def propose(drafter: Drafter, rows: Seq[Row], budget: Seq[int]) -> Draft:
    batch = Batch(tuple(rows))
    with torch.inference_mode():
        draft = drafter.propose(batch, budget)
    draft.check(batch, budget, VOCAB_SIZE, trees=True)
    return draft


def observe(drafter: Drafter, rows: Seq[Row], draft: Draft, accepted: Seq[range] = ()) -> None:
    """Told of a step that extended `rows` already; of a tree, a draft model looks at nothing else."""
    with torch.inference_mode():
        drafter.observe(Outcome(Batch(tuple(rows)), draft, tuple(accepted) or ((),) * len(rows), ()))


@cache
def probabilities(model: TargetModel, tokens: tuple[int, ...]) -> list[float]:
    """After `tokens`, without any cache."""
    with torch.inference_mode():
        shares: list[float] = model.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].softmax(-1).tolist()
    return shares


def children(model: TargetModel, prompt: Seq[int], way: tuple[int, ...], count: int) -> list[Node]:
    shares = probabilities(model, (*prompt, *way))
    best = sorted(range(len(shares)), key=lambda token: -shares[token])[:count]
    return [((*way, token), shares[token]) for token in best]


def reranked(model: TargetModel, prompt: Seq[int], candidates: list[Node], count: int) -> list[Node]:
    shares = dict(candidates)

    def score(way: tuple[int, ...]) -> float:
        return math.prod(shares[way[:length]] for length in range(1, len(way) + 1))

    return sorted(candidates, key=lambda node: -score(node[0]))[:count]


def static_tree(model: TargetModel, prompt: Seq[int], expansion: Seq[int], count: int) -> list[Node]:
    level, candidates = [((), 1.0)], list[Node]()
    for width in expansion:
        level = [child for way, _ in level for child in children(model, prompt, way, width)]
        candidates += level
    return reranked(model, prompt, candidates, count)


def dynamic_tree(model: TargetModel, prompt: Seq[int], depth: int, top_k: int, count: int) -> list[Node]:
    """EAGLE-2 §4 as it is written: expansion, then reranking."""
    candidates = level = children(model, prompt, (), top_k)
    for _ in range(1, depth):
        best = [node for node in reranked(model, prompt, candidates, len(candidates)) if node in level][:top_k]
        level = [child for way, _ in best for child in children(model, prompt, way, top_k)]
        candidates = candidates + level
    return reranked(model, prompt, candidates, count)


PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5], [8], [9, 10, 9]]


@looped("architecture", ["opt", "llama", "mistral"])
@looped("budget", [[14, 14, 14], [3, 0, 7], [1, 5, 14]])
def test_static_gives_every_node_of_a_level_the_same_number_of_children(architecture: str, budget: list[int]) -> None:
    model = draft_model(architecture)
    draft = propose(make_drafter(StaticShape([2, 3, 1]), model), list(map(sequence, PROMPTS, "abc")), budget)
    assert draft.lengths == budget  # 2 + 6 + 6 nodes
    for row, (prompt, count) in enumerate(zip(PROMPTS, budget, strict=True)):
        assert same(nodes(draft, row), static_tree(model, prompt, [2, 3, 1], count))


@looped("architecture", ["opt", "llama", "mistral"])
@looped(("depth", "top_k"), [(1, 3), (3, 2), (4, 3), (5, 1)])
@looped("budget", [[9, 9, 9], [2, 0, 5], [1, 30, 7]])
def test_dynamic_is_the_tree_of_eagle_2(architecture: str, depth: int, top_k: int, budget: list[int]) -> None:
    model = draft_model(architecture)
    shape = DynamicShape(30, depth, top_k)
    draft = propose(make_drafter(shape, model), list(map(sequence, PROMPTS, "abc")), budget)
    for row, (prompt, count) in enumerate(zip(PROMPTS, budget, strict=True)):
        assert same(nodes(draft, row), dynamic_tree(model, prompt, depth, top_k, count) if count else [])


def test_sequoia_drafts_the_tree_that_is_best_for_its_table() -> None:
    shape = SequoiaShape(5, 3, 3, [[0.5, 0.3, 0.1], [0.9, 0.05], [0.2]])
    prompt = [3, 4, 5]
    draft = propose(make_drafter(shape), [sequence(prompt)], [5])
    first = [way for way, _ in children(draft_model(), prompt, (), 3)]
    below = [children(draft_model(), prompt, way, 1)[0][0] for way in first[:2]]
    # Worth: 0.5, 0.3, 0.45 and 0.27 below these, and 0.1; the third child is worth more than the third level's 0.09.
    assert {way for way, _ in nodes(draft, 0)} == {*first, *below}


def test_sequoia_leaves_out_ranks_of_tokens_that_sampling_does_not_leave() -> None:
    """Its table has the second child first, and there is only one, or two."""
    shape = SequoiaShape(5, 1, 3, [[0.1, 0.5, 0.3]])
    for top_k in (1, 2):
        only = SamplingParams(temperature=1.0, top_k=top_k)
        row = Row(Request("a", (3, 4, 5), 40, sampling=only))
        assert propose(make_drafter(shape), [row], [5]).lengths == [top_k]


@looped("kind", ["chain", *TREES])
@looped("length", [11, 13, 14, 15, 16, 17])
def test_nothing_is_drafted_or_computed_beyond_the_draft_models_length(kind: str, length: int) -> None:
    drafter = draft_model_drafter(draft_model("opt", max_model_len=16), kind, VOCAB_SIZE)
    computed = watch(drafter)
    draft = propose(drafter, [sequence([3] * length)], [14])
    assert max(depths(draft.tree(0)), default=0) <= max(0, 16 - length)
    assert (length < 16) == (draft.indptr[-1] > 0)
    assert max((max(packed.kv_lens) for packed in computed), default=0) <= 16


@pytest.mark.parametrize("kind", TREES)
def test_one_pass_a_level_computes_only_nodes_that_get_children(kind: str) -> None:
    drafter = draft_model_drafter(draft_model(), kind, VOCAB_SIZE)
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


def test_a_temperature_sharpens_the_probabilities_and_so_deepens_the_tree() -> None:
    def draft(temperature: float, num_nodes: int = 6) -> Draft:
        return propose(make_drafter(DynamicShape(num_nodes, 6, 3, temperature)), [sequence(PROMPTS[0])], [num_nodes])

    for temperature in (1.0, 0.5):
        root = sorted(
            (torch.tensor(probabilities(draft_model(), tuple(PROMPTS[0]))).log() / temperature).softmax(-1).tolist()
        )
        confidence = draft(temperature).confidence
        assert confidence is not None
        assert math.isclose(confidence[0], root[-1], rel_tol=1e-6)
    assert max(depths(draft(0.05).tree(0))) > max(depths(draft(1.0).tree(0)))


def test_rows_that_the_cache_has_no_room_for_draft_nothing_in_that_step() -> None:
    drafter = make_drafter(StaticShape([2, 2]), max_tokens=24)  # six pages of four tokens
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
    run, calls = runner.run, list[PackedInputs]()

    def failing(packed: PackedInputs) -> Any:
        calls.append(packed)
        if len(calls) == 3:
            raise RuntimeError("the third pass fails")
        return run(packed)

    runner.run = failing
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
    drafter = draft_model_drafter(model, kind, VOCAB_SIZE)
    running: list[Row] = []
    admitted = 0
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        while not running or (len(running) < 4 and data.draw(st.booleans(), "admit")):
            running.append(sequence(data.draw(st.lists(TOKENS, min_size=1, max_size=9), "prompt"), str(admitted)))
            admitted += 1
        budget = data.draw(st.lists(st.integers(0, 14), min_size=len(running), max_size=len(running)), "budget")
        draft = propose(drafter, running, budget)
        fresh = propose(draft_model_drafter(model, kind, VOCAB_SIZE), running, budget)
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
    loads = list[tuple[str, bool]]()

    def load_runner(path: str, *, trees: bool = False, **_: Any) -> tuple[CausalLMRunner, None]:
        loads.append((path, trees))
        return CausalLMRunner(draft_model(), backend_for(draft_model())), None

    context = DrafterContext(VOCAB_SIZE, None, load_runner, lambda name, options: pytest.fail("asks for no other"))
    from emssd_draft_model import _build

    trees = _build(DraftModelConfig("small", tree="dynamic", num_nodes=7), context)  # type: ignore[arg-type]
    chain = _build(DraftModelConfig("small"), context)
    assert loads == [("small", True), ("small", False)]
    assert (trees.drafts_trees, trees.num_speculative_tokens) == (True, 7)
    assert (chain.drafts_trees, chain.num_speculative_tokens) == (False, 4)
