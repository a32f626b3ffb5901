"""Engines whose drafters draft trees give the tokens of plain greedy decoding, on every backend that takes trees.

Oracle: `greedy_reference`, eager attention without a cache, float64, of equal logits the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emssd_padded import PaddedConfig
from emssd_ragged import Kernels, RaggedConfig
from emssd_testing.conformance.setting import setting
from emssd_testing.drafters import TreeDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import References
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import AttentionBackend
from emssd.attention.trees import path
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafting import Outcome
from emssd.model import TargetModel
from tests.support.oracle import build, oracle_of
from tests.support.tiers import few, looped
from tests.support.trees import TREE_BACKENDS, DecoyDrafter, MixedDrafter

MakeBackend = Callable[[], AttentionBackend]
NEW = 12
every_backend = pytest.mark.parametrize("make", TREE_BACKENDS.values(), ids=TREE_BACKENDS)
every_model = pytest.mark.parametrize("name", ["llama-11", "mistral-17", "gemma2-7", "opt-5"])


@every_model
@every_backend
def test_all_that_is_right_is_accepted_among_decoys(make: MakeBackend, name: str, prompts: list[list[int]]) -> None:
    oracle = oracle_of(name)
    references = oracle.references(prompts, NEW)
    engine = build(oracle, make, DecoyDrafter(oracle.vocab_size, references), batch_size=3)
    done = engine.generate(prompts, NEW)
    assert [generation.token_ids for generation in done] == list(references.values())
    assert [generation.num_steps for generation in done] == [NEW // 4] * len(prompts)
    assert engine.report.num_accepted == NEW // 4 * 3 * len(prompts)
    assert engine.runner.usage.held == 0


@every_backend
@given(
    limits=st.lists(st.integers(1, 3), min_size=5, max_size=5), seed=st.integers(0, 99), batch_size=st.integers(1, 5)
)
@settings(max_examples=8)
def test_rows_that_may_generate_one_two_or_three_tokens(
    make: MakeBackend, limits: list[int], seed: int, batch_size: int, oracle: Any, prompts: list[list[int]]
) -> None:
    references = oracle.references(prompts, 3)
    for drafter in (
        TreeDrafter(oracle.vocab_size, 9, references, right=0.8, seed=seed),
        DecoyDrafter(oracle.vocab_size, references),
    ):
        done = build(oracle, make, drafter, batch_size).generate(prompts, limits)
        expected = [tokens[:limit] for tokens, limit in zip(references.values(), limits, strict=True)]
        assert [generation.token_ids for generation in done] == expected


@looped("stop", ["w1", "w3", "7", "w2 w", "nowhere"])
@looped("backend", ["ragged-page-16", "padded", "unpad_both"])
def test_a_stop_string_inside_of_an_accepted_path_ends_the_row(
    backend: str, stop: str, oracle: Any, prompts: list[list[int]]
) -> None:
    tokenizer, references = setting("llama", 11).context.tokenizer, oracle.references(prompts, NEW)
    engine = build(oracle, TREE_BACKENDS[backend], DecoyDrafter(11, references), tokenizer=tokenizer)
    num_ends = 0
    for generation, tokens in zip(engine.generate(prompts, NEW, stop=[stop]), references.values(), strict=True):
        ends = [n for n in range(1, NEW + 1) if stop in tokenizer.decode(tokens[:n])]
        assert generation.token_ids == tokens[: min(ends, default=NEW)]
        num_ends += bool(ends)
    assert num_ends == 0 if stop == "nowhere" else num_ends > 0


@every_backend
@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_rows_with_trees_beside_rows_with_chains_or_nothing(
    make: MakeBackend, data: st.DataObject, seed: int, prompts: list[list[int]]
) -> None:
    oracle = oracle_of(data.draw(st.sampled_from(["mistral-17", "gemma2-7"]), label="model"))
    references = oracle.references(prompts, NEW)
    drafter = MixedDrafter(oracle.vocab_size, 8, references, right=0.7, seed=seed)
    engine = build(oracle, make, drafter, data.draw(st.integers(2, 5), label="batch size"))
    done = engine.generate(prompts, NEW)
    assert [generation.token_ids for generation in done] == list(references.values())


class WatchedTrees(TreeDrafter):
    """Holds what the target chose at every node to what it chooses after the same tokens without a cache."""

    model: Any
    num_nodes = 0

    def observe(self, outcome: Outcome) -> None:
        for number, row in enumerate(outcome.batch):
            tree, start = outcome.draft.tree(number), outcome.draft.indptr[number]
            ids = outcome.draft.token_ids[start:].tolist()
            nodes, targets = outcome.accepted[number], outcome.target_ids[number]
            assert len(targets) == 1 + len(tree)
            assert list(nodes) == (path(tree, nodes[-1]) if nodes else [])
            before = row.tokens[: len(row.tokens) - 1 - len(nodes)]
            if row.finish_reason is not None:
                continue  # its end may be cut off
            for node in range(-1, len(tree)):
                text = [*before, *(ids[ancestor] for ancestor in path(tree, node))]
                assert targets[node + 1] == int(self.model(torch.tensor([text])).logits[0, -1].argmax())
                type(self).num_nodes += node >= 0


@every_backend
def test_a_drafter_hears_the_targets_choice_at_every_node(make: MakeBackend, prompts: list[list[int]]) -> None:
    oracle = oracle_of("mistral-17")
    references = oracle.references(prompts, NEW)
    drafter = WatchedTrees(oracle.vocab_size, 8, references, right=0.7, seed=3)
    drafter.model, WatchedTrees.num_nodes = oracle.target.model, 0
    done = build(oracle, make, drafter).generate(prompts, NEW)
    assert [generation.token_ids for generation in done] == list(references.values())
    assert WatchedTrees.num_nodes > 50


LITTLE: dict[str, Any] = {
    "page 16": RaggedConfig(page_size=16, kernels=Kernels.torch),
    "pad_kv": PaddedConfig(pad_kv=True),
    "unpad_kv": PaddedConfig(pad_kv=False),
    "page 1": RaggedConfig(page_size=1, kernels=Kernels.torch),
}


@pytest.mark.parametrize("name", few(LITTLE, ci=3))
def test_long_rows_of_which_some_are_preempted_or_in_whole_batches(name: str) -> None:
    """There is room for 256 tokens, where pages are, and three rows grow up to 360."""
    target, paged = TargetModel(tiny_model("llama", vocab_size=11, max_model_len=144)), "page" in name
    references = References(target, 120)
    limit = str(256 * target.kv_cache_spec(1).bytes_per_token()) if paged else None
    options = EngineOptions(batch_size=3, max_step_tokens=16, kv_memory=limit, on_drafter_error=OnDrafterError.fail)
    drafter = TreeDrafter(11, 12, references, right=0.6)
    engine = Engine.assemble(target, None, drafter=drafter, backend=LITTLE[name], budget="fixed", options=options)
    long_prompts, new_tokens = [(1, 2, 3), (5, 6), (7, 8, 9), (1, 2, 3, 4, 1, 2)], [120, 115, 110, 30]
    for generation, most in zip(engine.generate(long_prompts, new_tokens, ignore_eos=True), new_tokens, strict=True):
        assert generation.token_ids == references[tuple(generation.prompt_ids)][:most]
    assert engine.report.num_accepted > 40
    assert (engine.report.num_preempted > 0) == paged
