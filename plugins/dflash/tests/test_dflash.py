"""A head that its target always agrees with is always accepted, and with any fault in what it is fed it is not.

Oracles: plain decoding and sampling by hand, without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from emssd_dflash import DFlashConfig
from emssd_dflash.drafter import DFlashDrafter
from emssd_dflash.lane import BlockLane
from emssd_ragged import Kernels, RaggedConfig

from emssd.attention import PackedInputs
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafters.states import KnownStates
from emssd.drafting import DrafterContext, HiddenStates, Outcome
from emssd.model import BorrowedTarget, TargetModel
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from emssd.testing.oracle import References, greedy_reference
from tests.support import sampling as reference
from tests.support.heads import layer_weights, random_weights, write_head
from tests.support.looking_back import BLOCK, MASK, SIZE, VOCAB, looking_back_model, write_looking_back_block
from tests.support.tiers import looped

MODEL_LEN, NUM_NEW, LENGTH = 144, 31, BLOCK - 1
PROMPTS = [[1, 3, 4, 6, 0, 7, 8, 3], [6, 1, 1, 5, 0, 2, 5], [7, 8, 2, 2, 6, 4, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 1]]
KINDS: dict[str, list[SamplingParams | None]] = {
    "greedy": [None] * 4,
    "sampled": [SamplingParams(temperature=1 + row, seed=row) for row in range(4)],
    "mixed": [
        None,
        SamplingParams(temperature=6.0, seed=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=3.0, top_p=0.9, frequency_penalty=0.4, logit_bias={2: 3.0}, seed=2),
    ],
}


@cache
def target() -> TargetModel:
    return TargetModel(looking_back_model(max_model_len=MODEL_LEN))


@cache
def references() -> References:
    return References(target(), NUM_NEW)


@cache
def head_path() -> str:
    return write_looking_back_block(Path(mkdtemp(prefix="emssd-head-")))


@cache
def random_head() -> str:
    """A head that knows nothing: it reads two streams of the target."""
    config = {"architectures": ["DFlashDraftModel"], "hidden_size": SIZE, "intermediate_size": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "block_size": 6, "num_hidden_layers": 1}
    config |= {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}}
    sizes = {"fc.weight": (SIZE, 2 * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    sizes |= {"layers.0.input_layernorm.weight": (SIZE,)} | layer_weights("layers.0.", config, SIZE)
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, random_weights(sizes))


def make_engine(backend: Any = "ragged", path: str | None = None, **options: Any) -> Engine:
    """An engine whose drafter has a cache of its own, which may hold as many tokens as the target's."""
    chosen = EngineOptions(on_drafter_error=OnDrafterError.fail, **({"batch_size": 4} | options))
    limit = None if chosen.kv_memory is None else int(chosen.kv_memory) // target().kv_cache_spec(1).bytes_per_token()
    spec = replace(target().kv_cache_spec(chosen.batch_size), continuous=backend != "padded", max_tokens=limit)
    context = DrafterContext(
        VOCAB,
        None,
        lambda path: pytest.fail("asks for no model"),
        lambda name, values: pytest.fail("asks for no other"),
        "fail",
        BorrowedTarget(target()),
        spec,
        lambda own: make_backend(own, backend, Registry()),
    )
    drafter = DFlashDrafter.load(DFlashConfig(path=path or head_path()), context)
    return Engine.assemble(target(), None, drafter=drafter, backend=backend, budget="fixed", options=chosen)


@cache
def text(name: str, prompt: tuple[int, ...], params: SamplingParams | None) -> tuple[int, ...]:
    if params is None:
        return references()[prompt]
    return reference.sampled(target().model, prompt, NUM_NEW, params, name)


def decode(engine: Engine, kinds: Sequence[SamplingParams | None] = (None,) * 4) -> list[Generation]:
    """In order; every token is that of decoding by hand."""
    pairs = enumerate(zip(PROMPTS, kinds, strict=True))
    requests = [Request(str(row), tuple(ids), NUM_NEW, sampling=kind) for row, (ids, kind) in pairs]
    done = {generation.request_id: generation for generation in engine.run(requests)}
    for request in requests:
        assert done[request.request_id].token_ids == text(request.request_id, request.prompt_ids, request.sampling)
    return [done[request.request_id] for request in requests]


def is_full(done: Sequence[Generation]) -> bool:
    """Whether every row was drafted for in all of its steps but the first, and all of that was accepted."""
    whole, left = divmod(NUM_NEW - 1, LENGTH + 1)
    steps = 1 + whole + (1 if left else 0)
    return all(each.num_steps == steps and each.num_accepted == each.num_drafted for each in done)


@looped("backend", ["ragged", "padded"])
@looped("kinds", KINDS)
def test_a_head_that_is_always_right_is_always_accepted(kinds: str, backend: str) -> None:
    assert is_full(decode(make_engine(backend), KINDS[kinds]))


def test_prompts_in_pieces_and_rows_that_come_and_go() -> None:
    for generation in decode(make_engine(max_step_tokens=7, batch_size=2)):
        assert generation.num_accepted == generation.num_drafted > NUM_NEW // 2


def test_rows_that_are_preempted_begin_anew() -> None:
    limit = str(256 * target().kv_cache_spec(1).bytes_per_token())
    backend = RaggedConfig(kernels=Kernels.torch)
    engine = make_engine(backend, kv_memory=limit, max_step_tokens=16, batch_size=3)
    for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS, 110, ignore_eos=True), strict=True):
        assert generation.token_ids == tuple(greedy_reference(target().model, prompt, 110))
        assert generation.num_accepted == generation.num_drafted > 0
    assert engine.report.num_preempted > 0


@pytest.mark.parametrize("kinds", KINDS)
def test_no_token_depends_on_the_head(kinds: str) -> None:
    decode(make_engine(path=random_head(), batch_size=3, max_step_tokens=9), KINDS[kinds])


def test_a_step_that_failed_is_drafted_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    run, calls = engine.runner.run, list[int]()

    def fails(packed: PackedInputs) -> Any:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise torch.OutOfMemoryError("planted")
        return run(packed)

    monkeypatch.setattr(engine.runner, "run", fails)
    for row, prompt in enumerate(PROMPTS):
        engine.add(Request(str(row), tuple(prompt), NUM_NEW))
    done = list[Any]()
    while engine.has_work:
        try:
            done += engine.step()
        except torch.OutOfMemoryError:
            continue
    for row in done:
        assert tuple(row.output_ids) == references()[row.request.prompt_ids]
        assert row.num_accepted == row.num_drafted > NUM_NEW // 2


def earlier_features(patch: pytest.MonkeyPatch) -> None:
    """The feature of token i - 1 in the place of that of token i."""
    add, latest = KnownStates.add, dict[int, torch.Tensor]()

    def shifted(self: KnownStates, start: int, features: torch.Tensor) -> None:
        before = latest[id(self)] if start else features[:1]
        latest[id(self)] = features[-1:]
        add(self, start, torch.cat([before, features])[:-1])

    patch.setattr(KnownStates, "add", shifted)


def other_layers(patch: pytest.MonkeyPatch) -> None:
    observe = DFlashDrafter.observe

    def shifted(self: Any, outcome: Outcome) -> None:
        hidden = outcome.hidden
        assert isinstance(hidden, HiddenStates)
        observe(self, replace(outcome, hidden=replace(hidden, states=hidden.states[-1:] + hidden.states[:-1])))

    patch.setattr(DFlashDrafter, "observe", shifted)


def blocks_too_deep(patch: pytest.MonkeyPatch) -> None:
    positions = BlockLane._positions

    def shifted(self: Any, rows: Any) -> tuple[list[int], list[int]]:
        features, blocks = positions(self, rows)
        return features, [place + 1 for place in blocks]

    patch.setattr(BlockLane, "_positions", shifted)


def kv_of_masks(patch: pytest.MonkeyPatch) -> None:
    """That of a block's first tokens stays in the cache as that of the features of the tokens that came there."""
    blocks, add = DFlashDrafter._blocks, KnownStates.add

    def keep(self: Any, rows: Any) -> Any:
        patch.setattr(self._runner._backend, "commit", lambda kept: None)
        return blocks(self, rows)

    def added(self: KnownStates, start: int, features: torch.Tensor) -> None:
        add(self, start, features)
        if start:
            self.used(self.stop - 1)

    patch.setattr(DFlashDrafter, "_blocks", keep)
    patch.setattr(KnownStates, "add", added)


def the_slot_before(patch: pytest.MonkeyPatch) -> None:
    slots = DFlashDrafter.slots
    patch.setattr(DFlashDrafter, "slots", lambda self, rows: slots(self, rows).roll(1, 0))


def no_newest_token(patch: pytest.MonkeyPatch) -> None:
    """A block begins with another token; only what its last slot finds there is wrong."""
    begin = DFlashDrafter._begin

    def planted(self: Any, batch: Any, budget: Any) -> Any:
        rows = begin(self, batch, budget)
        return [replace(row, tokens=[*row.tokens[:-1], (row.tokens[-1] + 1) % 9]) for row in rows]

    patch.setattr(DFlashDrafter, "_begin", planted)


def another_mask(patch: pytest.MonkeyPatch) -> None:
    embed = BorrowedTarget.embed

    def planted(self: Any, ids: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
        return embed(self, torch.where(ids == MASK, MASK - 1, ids), raw=raw)

    patch.setattr(BorrowedTarget, "embed", planted)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "earlier features": earlier_features,
    "other layers": other_layers,
    "blocks one position too deep": blocks_too_deep,
    "KV of masks": kv_of_masks,
    "the slot before": the_slot_before,
    "another token at the beginning": no_newest_token,
    "another mask": another_mask,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_is_fed_wrongly_is_accepted_less_and_no_token_changes(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    done = decode(make_engine())
    assert not is_full(done)
    assert all(each.num_drafted for each in done)
