"""What `emssd.testing` gives to plugin authors does what it says: drafters, references, strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec, additive_mask, masked_attention
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.sequences import Batch, Request, Row
from emssd.testing.drafters import (
    PerfectDrafter,
    RandomDrafter,
    ScriptedDrafter,
    WrongDrafter,
)
from emssd.testing.oracle import DenseBackend, greedy_reference
from emssd.testing.strategies import layer_specs
from tests.support.strategies import EosDrafter, drafters_with_eos, step_histories

REFERENCE = (3, 1, 4, 1, 5, 2, 6, 5)
BY_ID, BY_PROMPT = {"a": REFERENCE}, {(7, 7): REFERENCE}


def row(*generated: int) -> Row:
    sequence = Row(Request("a", (7, 7), 20))
    sequence.extend(list(generated))
    return sequence


def chain(drafter: Any, sequence: Row, limit: int) -> list[int]:
    return drafter.propose(Batch((sequence,)), [limit]).token_ids.tolist()


@pytest.mark.parametrize("references", [BY_ID, BY_PROMPT], ids=["by id", "by prompt"])
def test_perfect_drafter_goes_on_where_the_sequence_is(references: Any) -> None:
    drafter = PerfectDrafter(8, 4, references)
    assert chain(drafter, row(), 4) == [3, 1, 4, 1]
    assert chain(drafter, row(3, 1, 4), 2) == [1, 5]
    assert chain(drafter, row(*REFERENCE[:7]), 4) == [5]
    assert chain(drafter, row(*REFERENCE), 4) == []


@given(st.integers(0, 7), st.integers(1, 5))
def test_wrong_drafter_is_wrong_at_once_and_right_behind_it(num_generated: int, limit: int) -> None:
    drafted = chain(WrongDrafter(8, 4, BY_ID), row(*REFERENCE[:num_generated]), limit)
    right = list(REFERENCE[num_generated:][:limit])
    assert drafted[0] != right[0]
    assert drafted[1:] == right[1:]


def test_random_drafter_gives_all_lengths_and_both_right_and_wrong_tokens() -> None:
    drafter = RandomDrafter(8, 4, BY_ID, seed=1)
    drafted = [chain(drafter, row(), 4) for _ in range(200)]
    assert {len(tokens) for tokens in drafted} == {0, 1, 2, 3, 4}
    agreed = {next((i for i, token in enumerate(t) if token != REFERENCE[i]), len(t)) for t in drafted}
    assert agreed == {0, 1, 2, 3, 4}
    again = RandomDrafter(8, 4, BY_ID, seed=1)
    assert [chain(again, row(), 4) for _ in range(200)] == drafted


def test_eos_drafter_puts_eos_everywhere_also_behind_right_tokens() -> None:
    drafter = EosDrafter({0}, 8, 4, BY_ID)
    drafted = [tokens for _ in range(200) if (tokens := chain(drafter, row(), 4))]
    assert all(0 in tokens for tokens in drafted)
    assert {tokens.index(0) for tokens in drafted} == {0, 1, 2, 3}
    assert [3, 1, 0] in [tokens[:3] for tokens in drafted]


def test_scripted_drafter_follows_its_script_round_and_round() -> None:
    drafter, sequence = ScriptedDrafter([(2, [9, 0]), (0, [])], 8, 4, BY_ID), row()
    assert chain(drafter, sequence, 4) == [3, 1, 1, 0]
    assert chain(drafter, sequence, 3) == [3, 1, 1]
    sequence.advance([], None, num_drafted=0, num_accepted=0)
    assert chain(drafter, sequence, 4) == []
    sequence.advance([], None, num_drafted=0, num_accepted=0)
    assert chain(drafter, sequence, 1) == [3]


@given(st.data())
def test_every_drawn_drafter_keeps_to_budget_and_vocabulary(data: st.DataObject) -> None:
    drafter = data.draw(drafters_with_eos(8, BY_ID, [0, 2]))
    sequence = row(*REFERENCE[: data.draw(st.integers(0, 8))])
    limit = data.draw(st.integers(0, drafter.num_speculative_tokens))
    drafted = chain(drafter, sequence, limit)
    assert len(drafted) <= limit
    assert all(0 <= token < 8 for token in drafted)


@given(step_histories(3, max_drafted=4))
def test_histories_accept_no_more_than_was_drafted(history: list[list[tuple[int, int]]]) -> None:
    assert all(len(step) == 3 for step in history)
    assert all(0 <= accepted <= drafted <= 4 for step in history for drafted, accepted in step)


@pytest.mark.parametrize("name", ["opt-61", "llama-11", "mistral-17", "gemma2-7"])
def test_greedy_reference_is_what_transformers_generates(
    name: str, oracles: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = oracles(name).target.model
    if getattr(model.config, "attn_logit_softcapping", None):
        monkeypatch.setattr(model.config, "_attn_implementation", "eager")  # an older SDPA drops the cap
    for prompt in prompts:
        eos = greedy_reference(model, prompt, 4)[-1]
        for stop in ((), (eos,)):
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "eos_token_id": list(stop) or None, "pad_token_id": 0}
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, **options)
            assert greedy_reference(model, prompt, 10, stop) == theirs[0, len(prompt) :].tolist()


def test_greedy_reference_leaves_the_model_as_it_was(oracle: Any) -> None:
    model = oracle.target.model
    before = model.config._attn_implementation
    greedy_reference(model, [1], 2)
    assert model.config._attn_implementation == before


@given(layer_specs(), st.integers(1, 7), st.integers(0, 2**16))
def test_dense_backend_agrees_with_masked_attention_on_one_prompt(layer: LayerSpec, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (length, layer.num_qo_heads, layer.key_dim),
        (length, layer.num_kv_heads, layer.key_dim),
        (length, layer.num_kv_heads, layer.value_dim),
    ]
    query, key, value = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if layer.sliding_window is not None:
        mask = mask.triu(1 - layer.sliding_window)
    backend = DenseBackend()
    backend.allocate(KVCacheSpec((layer,), torch.float64, torch.device("cpu"), 1, 64))
    plan = backend.plan(pack([Row(Request("a", (1,) * length, 1))], Draft.empty(1)))
    expected = masked_attention(query[None], key[None], value[None], additive_mask(mask[None], query.dtype), layer)[0]
    torch.testing.assert_close(backend.forward(plan, 0, query, key, value), expected, atol=1e-12, rtol=0)
