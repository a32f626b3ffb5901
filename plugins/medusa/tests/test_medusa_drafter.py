"""Heads that their target always agrees with are always accepted, and with any fault in what they are fed they are not.

Oracles: plain decoding and sampling by hand, without a cache; the best of all combinations of the heads' choices, from
formulas written anew. float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from emssd_medusa import MedusaConfig
from emssd_medusa.drafter import MedusaDrafter
from emssd_medusa.heads import MedusaHeads
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafters.heads.options import TreeKind
from emssd.drafters.heads.trees import read_trees
from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd.sequences import Batch, Request
from tests.support.fed_heads import KINDS, NUM_NEW, PROMPTS, Trial, earlier_states, states_of_other_nodes
from tests.support.heads import Weights, random_weights, write_head
from tests.support.hidden import right_states
from tests.support.perfect_medusa import NUM_HEADS, SIZE, VOCAB, lagging_target, write_perfect_medusa
from tests.support.tiers import looped

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static"},
    "dynamic": {"tree": "dynamic", "num_nodes": 14},
}
SHARPNESS = 8.0  # of the target: its first choices are in every tree


@cache
def heads_path(vllm: bool = False) -> str:
    return write_perfect_medusa(Path(mkdtemp(prefix="emssd-heads-")), SHARPNESS, vllm=vllm)


@cache
def trial() -> Trial:
    def load(options: Mapping[str, Any], context: Any) -> MedusaDrafter:
        return MedusaDrafter.load(MedusaConfig(**({"path": heads_path()} | dict(options))), context)

    return Trial(TargetModel(lagging_target(sharpness=SHARPNESS)), NUM_HEADS, load)


def test_the_text_is_worth_guessing() -> None:
    texts = [trial().text(str(row), prompt, None) for row, prompt in enumerate(PROMPTS)]
    assert len({each[place : place + 3] for each in texts for place in range(NUM_NEW - 2)}) > 60


@looped("kinds", KINDS)
@looped("shape", SHAPES)
def test_heads_that_are_always_right_are_always_accepted(shape: str, kinds: str) -> None:
    trial().make_engine(SHAPES[shape])
    trial().decode(KINDS[kinds])
    assert trial().is_full()


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_padded(shape: str) -> None:
    trial().make_engine(SHAPES[shape], "padded")
    trial().decode(KINDS["mixed"])
    assert trial().is_full()


@pytest.mark.parametrize("kinds", KINDS)
def test_heads_of_some_tokens_only(kinds: str) -> None:
    trial().make_engine(SHAPES["dynamic"] | {"path": heads_path(vllm=True)})
    trial().decode(KINDS[kinds])
    assert trial().is_full()


@pytest.mark.parametrize("max_step_tokens", [5, 24])
def test_prompts_in_pieces(max_step_tokens: int) -> None:
    trial().make_engine(SHAPES["chain"], max_step_tokens=max_step_tokens, batch_size=2)
    for generation in trial().decode():
        assert generation.num_accepted == generation.num_drafted > NUM_NEW // 2


def test_rows_that_are_preempted_begin_anew() -> None:
    trial().decode_preempted(SHAPES["chain"])


def test_a_step_that_failed_is_drafted_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trial().make_engine(SHAPES["dynamic"])
    trial().failing_steps(monkeypatch)
    assert trial().is_full()


def other_heads(patch: pytest.MonkeyPatch) -> None:
    """Each level is that of the head for the level above."""
    forward = MedusaHeads.forward
    patch.setattr(MedusaHeads, "forward", lambda self, *given: forward(self, *given).roll(1, 0))


def states_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    forward = MedusaHeads.forward
    patch.setattr(MedusaHeads, "forward", lambda self, hidden, *given: forward(self, hidden.roll(1, 0), *given))


def states_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MedusaDrafter, "hidden_layers", (1,))


FAULTS = {
    "other heads": other_heads,
    "earlier states": earlier_states(MedusaDrafter),
    "states of rejected nodes": states_of_other_nodes,
    "states of other rows": states_of_other_rows,
    "states before the norm": states_before_the_norm,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_heads_that_are_fed_wrongly_are_accepted_less_and_no_token_changes(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    engine = trial().make_engine(SHAPES["static"])
    trial().decode()
    assert not trial().is_full()
    assert engine.report.num_drafted > 0


@cache
def random_heads(seed: int) -> tuple[str, Weights]:
    """Heads that know nothing, of two layers each."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        for layer in range(2):
            shapes |= {f"{head}.{layer}.linear.weight": (SIZE, SIZE), f"{head}.{layer}.linear.bias": (SIZE,)}
        shapes[f"{head}.2.weight"] = (VOCAB, SIZE)
    weights = random_weights(shapes, seed)
    return write_head(Path(mkdtemp(prefix="emssd-heads-")), {}, weights, "medusa_lm_head.pt"), weights


def probabilities(weights: Weights, tokens: list[int]) -> list[list[float]]:
    """By head, the probability of each token, from the state of the token before the newest one."""
    (states,) = right_states(trial().target.model, tokens[:-1], [-1])
    found = []
    for head in range(3):
        x = states[-1]
        for layer in range(2):
            y = weights[f"{head}.{layer}.linear.weight"].double() @ x + weights[f"{head}.{layer}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
        found.append(torch.softmax(weights[f"{head}.2.weight"].double() @ x, 0).tolist())
    return found


def best_combinations(by_head: list[list[float]], ways: set[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """The `number` most probable of the paths whose tokens have these ranks."""
    ranked = [sorted(range(VOCAB), key=lambda token, own=own: -own[token]) for own in by_head]
    products = {
        tuple(ranked[level][rank] for level, rank in enumerate(way)): math.prod(
            by_head[level][ranked[level][rank]] for level, rank in enumerate(way)
        )
        for way in ways
    }
    return sorted(products, key=lambda path: -products[path])[:number]


def all_ways(shape: str) -> set[tuple[int, ...]]:
    if shape == "static":
        tree, found = read_trees("emssd_medusa")["vicuna_7b_stage2"], list[tuple[int, ...]]()
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), rank))
        return {way for way in found if max(way) < VOCAB and len(way) <= 3}
    ranks = range(1 if shape == "chain" else VOCAB)
    return {way for depth in range(1, 4) for way in product(ranks, repeat=depth)}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_most_probable_combinations_are_drafted(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, weights = random_heads(0)
    engine = trial().make_engine(
        {"path": path, "tree": shape, "num_nodes": 40, "static_tree": "vicuna_7b_stage2"}, batch_size=2
    )
    propose, num_compared = MedusaDrafter.propose, 0

    def compared(self: MedusaDrafter, batch: Batch, budget: Seq[int]) -> Draft:
        nonlocal num_compared
        budget = [min(limit, (2, 40, 11, 3)[num_compared % 4]) for limit in budget]
        draft = propose(self, batch, budget)
        for at, (row, limit) in enumerate(zip(batch, budget, strict=True)):
            paths, start = list[tuple[int, ...]](), draft.indptr[at]
            for token, parent in zip(draft.token_ids[start:].tolist(), draft.tree(at), strict=False):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            if paths:
                num_compared += 1
                by_head = probabilities(weights, list(row.tokens))
                ways = {way for way in all_ways(shape) if len(way) < row.num_remaining}
                assert paths == best_combinations(by_head, ways, limit)
                assert draft.confidence is not None
                sure = [by_head[len(path) - 1][path[-1]] for path in paths]
                assert list(draft.confidence[start : start + len(paths)]) == pytest.approx(sure, rel=1e-9)
        return draft

    monkeypatch.setattr(MedusaDrafter, "propose", compared)
    engine.generate(PROMPTS[:2], 14, ignore_eos=True)
    assert num_compared > 8


PROMPT = st.sampled_from([(6,), (1, 1), (7, 8, 3), *map(tuple, PROMPTS)])
SAMPLING = st.sampled_from([None, None, *KINDS["sampled"], *KINDS["mixed"]])


@settings(max_examples=10)
@given(
    rows=st.lists(st.tuples(PROMPT, st.integers(1, 14), SAMPLING), min_size=1, max_size=5),
    seed=st.integers(0, 1),
    shape=st.sampled_from(sorted(SHAPES)),
    backend=st.sampled_from(["ragged", "padded"]),
    batch_size=st.integers(1, 4),
    max_step_tokens=st.sampled_from([64, 6]),
)
def test_no_token_depends_on_the_heads(
    rows: Any, seed: int, shape: str, backend: str, batch_size: int, max_step_tokens: int
) -> None:
    options = SHAPES[shape] | {"path": random_heads(seed)[0]}
    steps = {"max_step_tokens": max_step_tokens} if backend == "ragged" else {}
    engine = trial().make_engine(options, backend, batch_size=batch_size, **steps)
    requests = [Request(str(row), prompt, num_new, sampling=kind) for row, (prompt, num_new, kind) in enumerate(rows)]
    for generation in engine.run(requests):
        prompt, num_new, kind = rows[int(generation.request_id)]
        assert generation.token_ids == trial().text(generation.request_id, prompt, kind, num_new)


@looped(
    ("options", "words"),
    [
        ({"path": None}, "give drafter.path=FOLDER"),
        ({"path": "./nowhere"}, "there is no such folder"),
        ({"tree": "statics"}, "drafter.tree is 'statics'; did you mean 'static'"),
        ({"static_tree": "vicuna_7b"}, "drafter.static_tree is 'vicuna_7b'; did you mean 'vicuna_7b_stage"),
        ({"static_tree": "none"}, "drafter.static_tree is 'none'; choose one of mc_sim_7b_63, "),
        ({"depth": 0}, "drafter.depth is 0; it must be at least 1"),
        ({"num_nodes": 0}, "drafter.num_nodes is 0; it must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trial().make_engine(options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("depth", "num_nodes"), [(None, 63), (2, 38), (9, 63)])
def test_a_published_tree_is_cut_to_the_levels_there_are(depth: int | None, num_nodes: int) -> None:
    tree = read_trees("emssd_medusa")["mc_sim_7b_63"]
    engine = trial().make_engine({"tree": "static", "depth": depth})
    assert engine.drafting.num_speculative_tokens == sum(each <= (depth or 4) for each in tree.depths) == num_nodes


def test_it_is_offered() -> None:
    engine = Engine.assemble(
        trial().target,
        None,
        drafter=MedusaConfig(path=heads_path(), tree=TreeKind.chain),
        backend="ragged",
        budget="fixed",
        options=EngineOptions(batch_size=4, on_drafter_error=OnDrafterError.fail),
    )
    trial().engine = engine
    trial().decode()
    assert trial().is_full()
