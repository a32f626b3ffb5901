"""A head that its target always agrees with is always accepted, and with any fault in what it is fed it is not.

Oracles: plain decoding and sampling by hand, without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emssd.drafters.paired
from emssd.attention import PackedInputs
from emssd.decoding.packing import pack_nodes
from emssd.drafters import PairedDrafter
from emssd.drafters.states import KnownStates
from emssd.drafting import BudgetPolicy, BudgetStep
from emssd.sequences import Request
from emssd.testing.oracle import greedy_reference
from tests.support.fed_heads import KINDS
from tests.support.paired import (
    DEPTH,
    HEADS,
    NUM_NEW,
    PROMPTS,
    decode,
    decode_failing,
    is_full,
    make_engine,
    sure,
    target,
    text,
)
from tests.support.perfect_head import VOCAB
from tests.support.random_heads import random_head
from tests.support.tiers import looped

SHAPES = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static"},
    "dynamic": {"tree": "dynamic", "num_nodes": 14, "top_k": 3},
}
DEPTHS = {"chain": DEPTH, "static": 5, "dynamic": DEPTH}


def test_the_text_is_worth_guessing() -> None:
    """It repeats itself late, no rounding decides it, and all of its last three tokens count."""
    texts = [text(str(row), tuple(prompt), None) for row, prompt in enumerate(PROMPTS)]
    assert len({each[place : place + 3] for each in texts for place in range(NUM_NEW - 2)}) > 30


@looped("backend", ["ragged", "padded"])
@looped("kinds", KINDS)
@looped("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.costly("every shape, kind of sampling and backend")
def test_a_head_that_is_always_right_is_always_accepted(head: str, shape: str, kinds: str, backend: str) -> None:
    engine = make_engine(head, SHAPES[shape], backend, adapted=sure)
    decode(engine, KINDS[kinds])
    assert is_full(engine, DEPTHS[shape])


@looped("shape", ["chain", "dynamic"])
@looped("max_step_tokens", [5, 24])
@pytest.mark.parametrize("head", HEADS)
def test_prompts_in_pieces(head: str, shape: str, max_step_tokens: int) -> None:
    engine = make_engine(head, SHAPES[shape], adapted=sure, max_step_tokens=max_step_tokens, batch_size=2)
    for generation in decode(engine):
        if shape == "chain":
            assert generation.num_accepted == generation.num_drafted
        assert generation.num_accepted > NUM_NEW // 2


def test_later_rows_of_the_same_names_have_nothing_of_earlier_ones() -> None:
    engine = make_engine("eagle3", SHAPES["chain"], adapted=sure)
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[1:]):
        for generation in engine.generate(prompts, NUM_NEW):
            assert generation.token_ids == text("", generation.prompt_ids, None)
            assert generation.num_accepted == generation.num_drafted > NUM_NEW // 2


class Seldom(BudgetPolicy):
    """Drafts in every eleventh step, and then for every other row."""

    num_steps = 0

    def allot(self, step: BudgetStep) -> list[int]:
        self.num_steps += 1
        drafts = self.num_steps % 11 == 0
        return [limit if drafts and (row + self.num_steps) % 2 else 0 for row, limit in enumerate(step.limits)]


@pytest.mark.parametrize(("num_arrived", "num_waiting"), [(1024, 256), (9, 4)], ids=str)
def test_rows_that_seldom_draft(num_arrived: int, num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target computed in the meantime is laid aside, or made features of where it becomes too much."""
    monkeypatch.setattr(emssd.drafters.states, "_MOST_ARRIVED", num_arrived)
    monkeypatch.setattr(emssd.drafters.states, "_MOST_WAITING", num_waiting)
    engine = make_engine("eagle3", SHAPES["chain"], adapted=sure)
    engine.drafting.policy = Seldom()
    done = decode(engine)
    assert all(generation.num_accepted == generation.num_drafted for generation in done)
    assert sum(generation.num_drafted for generation in done) > 2 * DEPTH


@cache
def long_text(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(greedy_reference(target().model, prompt, 120))


@pytest.mark.parametrize("head", HEADS)
def test_rows_that_are_preempted_begin_anew(head: str) -> None:
    limit = str(256 * target().kv_cache_spec(1).bytes_per_token())
    engine = make_engine(head, SHAPES["chain"], kv_memory=limit, max_step_tokens=16, batch_size=3)
    for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS, 120, ignore_eos=True), strict=True):
        assert generation.token_ids == long_text(tuple(prompt))
        assert generation.num_accepted == generation.num_drafted > 0
    assert engine.report.num_preempted > 0


def other_embeddings(patch: pytest.MonkeyPatch) -> None:
    inputs = PairedDrafter._inputs

    def shifted(self: Any, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return inputs(self, token_ids.roll(1), features)

    patch.setattr(PairedDrafter, "_inputs", shifted)


def embeddings_of_the_feature(patch: pytest.MonkeyPatch) -> None:
    """Token i in the place of token i + 1, where the target has computed both."""
    begin = PairedDrafter._begin

    def shifted(self: Any, batch: Any, budget: Any) -> Any:
        return [replace(row, tokens=row.tokens[:-1]) for row in begin(self, batch, budget)]

    patch.setattr(PairedDrafter, "_begin", shifted)


def earlier_features(patch: pytest.MonkeyPatch) -> None:
    """The feature of token i - 1 in the place of that of token i."""
    add, latest = KnownStates.add, dict[int, torch.Tensor]()

    def shifted(self: KnownStates, start: int, features: torch.Tensor) -> None:
        before = latest[id(self)] if start else features[:1]
        latest[id(self)] = features[-1:]
        add(self, start, torch.cat([before, features])[:-1])

    patch.setattr(KnownStates, "add", shifted)


def no_feedback(patch: pytest.MonkeyPatch) -> None:
    """Each level gets the outputs of another node than its parent."""
    compute = PairedDrafter.compute

    def shifted(self: Any, level: Any) -> torch.Tensor:
        self._hidden = self._hidden.roll(1, 0)
        return compute(self, level)

    patch.setattr(PairedDrafter, "compute", shifted)


def positions_of_trees(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def shifted(names: Any, ids: Any, lengths: Any, kv_lens: Any, trees: Any = None) -> PackedInputs:
            packed = pack_nodes(names, ids, lengths, kv_lens, trees)
            return replace(packed, position_ids=packed.position_ids + by)

        patch.setattr(emssd.drafters.levels, "pack_nodes", shifted)

    return plant


def positions_of_pairs(patch: pytest.MonkeyPatch) -> None:
    """Those of the newest pairs are one too high, as if counted with the prompt's first token."""

    def shifted(names: Any, ids: Any, lengths: Any, kv_lens: Any, trees: Any = None) -> PackedInputs:
        packed = pack_nodes(names, ids, lengths, kv_lens, trees)
        return packed if trees is not None else replace(packed, position_ids=packed.position_ids + 1)

    patch.setattr(emssd.drafters.paired, "pack_nodes", shifted)


def kv_of_rejected_nodes(patch: pytest.MonkeyPatch) -> None:
    """The tree's first nodes stay in the cache as the pairs of the tokens that came in their place."""
    propose, add = PairedDrafter.propose, KnownStates.add

    def keep(self: Any, batch: Any, budget: Any) -> Any:
        commit, self._runner.commit = self._runner.commit, lambda kept: None
        draft = propose(self, batch, budget)
        self._runner.commit = commit
        return draft

    def added(self: KnownStates, start: int, features: torch.Tensor) -> None:
        add(self, start, features)
        if start:
            self.num_used += len(features) - 1

    patch.setattr(PairedDrafter, "propose", keep)
    patch.setattr(KnownStates, "add", added)


def other_layers(patch: pytest.MonkeyPatch) -> None:
    """Those of the head in another order; what is before the final norm in the place of what is behind it."""
    make = PairedDrafter.__init__

    def shifted(self: Any, head: Any, layers: Any, *others: Any) -> None:
        make(self, head, (3,) if tuple(layers) == (-1,) else (*layers[-1:], *layers[:-1]), *others)

    patch.setattr(PairedDrafter, "__init__", shifted)


FAULTS = {
    "other embeddings": other_embeddings,
    "embeddings of the feature": embeddings_of_the_feature,
    "earlier features": earlier_features,
    "another node's output fed back": no_feedback,
    "tree one position too deep": positions_of_trees(1),
    "tree one position too shallow": positions_of_trees(-1),
    "newest pairs one position too deep": positions_of_pairs,
    "KV of rejected nodes": kv_of_rejected_nodes,
    "other layers": other_layers,
}
FORGIVEN = ("mtp", "other layers")  # such a layer norms once more what it reads, and the target's norm weighs nothing


@pytest.mark.parametrize(
    ("head", "fault"), [(head, fault) for head in HEADS for fault in FAULTS if (head, fault) != FORGIVEN]
)
def test_a_head_that_is_fed_wrongly_is_accepted_less_and_no_token_changes(
    head: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    engine = make_engine(head, SHAPES["dynamic"], adapted=sure)
    decode(engine)
    assert not is_full(engine)
    assert engine.report.num_drafted > 0


PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple)
SAMPLING = st.sampled_from([None, None, *KINDS["sampled"], *KINDS["mixed"]])


@given(
    rows=st.lists(st.tuples(PROMPT, st.integers(1, 14), SAMPLING), min_size=1, max_size=5),
    head=st.sampled_from(["eagle", "eagle3", "peagle", "mtp"]),
    layer_ids=st.sampled_from(["auto", "hs"]),
    seed=st.integers(0, 2),
    shape=st.sampled_from(sorted(SHAPES)),
    backend=st.sampled_from(["ragged", "padded"]),
    batch_size=st.integers(1, 4),
    max_step_tokens=st.sampled_from([64, 6]),
)
def test_no_token_depends_on_the_head(
    rows: Any, head: str, layer_ids: str, seed: int, shape: str, backend: str, batch_size: int, max_step_tokens: int
) -> None:
    options = SHAPES[shape] | {"path": random_head(head, seed).path}
    plugin, more = (head, {}) if head in ("eagle", "mtp") else ("eagle3", {"layer_ids": layer_ids})
    steps = {"max_step_tokens": max_step_tokens} if backend == "ragged" else {}
    engine = make_engine(plugin, options | more, backend, batch_size=batch_size, **steps)
    requests = [Request(str(row), prompt, num_new, sampling=kind) for row, (prompt, num_new, kind) in enumerate(rows)]
    for generation in engine.run(requests):
        prompt, num_new, kind = rows[int(generation.request_id)]
        assert generation.token_ids == text(generation.request_id, prompt, kind, 14)[:num_new]


def test_a_step_that_failed_is_drafted_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("eagle3", SHAPES["dynamic"], adapted=sure)
    decode_failing(engine, monkeypatch)
    assert is_full(engine)


def test_a_head_with_a_longest_row_drafts_no_further() -> None:
    longest = {"max_position_embeddings": 20, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    path = HEADS["eagle3"].write(Path(mkdtemp(prefix="emssd-head-")), **longest)
    engine = make_engine("eagle3", SHAPES["dynamic"] | {"path": path}, adapted=sure)
    long = decode(engine)[3]
    assert 0 < long.num_accepted < 12
