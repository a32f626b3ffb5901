"""Engines that verify random trees on the fused kernel: the tokens of greedy decoding, and the bits of plain steps.

Oracles: `greedy_reference` in float64; in bfloat16 the same model on one plain row of the tokens that a node sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from emssd_ragged.backend import ragged_backend
from emssd_testing.drafters import TreeDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference, seen

from emssd.attention import Kept, PackedInputs
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.model import CausalLMRunner, ModelOptions, ModelOutput, TargetModel
from emssd.sequences import Request

VOCAB_SIZE, NEW_TOKENS = 13, 30
PROMPTS = [(3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4, 5, 6), (8,), (9, 3, 11, 4, 9, 3, 12, 5), (10, 6, 6, 7) * 5, (1, 2)]


@pytest.fixture(autouse=True)
def _kernels(kernels: None) -> None:
    """All of these tests need them."""


class WatchedRunner(CausalLMRunner):
    """Remembers logits by all of the tokens that they follow, and that the KV holds."""

    def __init__(self, model: TargetModel) -> None:
        backend = ragged_backend(kernels="fused")
        backend.allocate(_spec(model))
        super().__init__(model, backend)
        self.seen_logits: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self.num_branches = self.num_moved = 0
        self._tokens: dict[str, list[int]] = {}

    def run(self, packed: PackedInputs) -> ModelOutput:
        output = super().run(packed)
        wanted = dict(zip(packed.logit_rows.tolist(), output.logits, strict=True))
        for row, (request_id, kv_len) in enumerate(zip(packed.request_ids, packed.kv_lens, strict=True)):
            start, stop = packed.qo_indptr[row], packed.qo_indptr[row + 1]
            tokens = self._tokens.get(request_id, [])[: kv_len - (stop - start)]
            tokens += packed.input_ids[start:stop].tolist()
            self._tokens[request_id] = tokens
            tree = packed.trees[row] if packed.trees is not None else ()
            self.num_branches += sum(parent != node - 1 for node, parent in enumerate(tree))
            for token in range(start, stop):
                if token in wanted:
                    visible = seen(packed, row, kv_len - (stop - token))
                    self.seen_logits.append((tuple(tokens[index] for index in visible), wanted[token].clone()))
        return output

    def commit(self, kept: Kept) -> None:
        super().commit(kept)
        for request_id, before, after in kept.moves():
            self.num_moved += len(before)
            moved = [self._tokens[request_id][index] for index in before]
            self._tokens[request_id][after.start : after.stop] = moved
        for request_id, kv_len in zip(kept.request_ids, kept.kv_lens, strict=True):
            del self._tokens[request_id][kv_len:]


def _spec(model: TargetModel) -> Any:
    return replace(model.kv_cache_spec(3), continuous=True, trees=True)


def decode(target: TargetModel, references: Mapping[tuple[int, ...], Seq[int]], seed: int) -> tuple[Any, WatchedRunner]:
    runner = WatchedRunner(target)
    drafter = TreeDrafter(VOCAB_SIZE, 14, references, seed=seed)
    engine = Engine(runner, drafter, scheduler=ContinuousScheduler(3, 16, headroom=0), on_drafter_error="fail")
    requests = [Request(str(number), prompt, NEW_TOKENS) for number, prompt in enumerate(PROMPTS)]
    done = {row.prompt_ids: row.token_ids for row in engine.run(requests)}
    assert runner.num_branches > 50
    assert runner.num_moved > 5
    assert engine.report.mean_acceptance_length > 1.2
    return done, runner


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
def test_random_trees_give_the_tokens_of_greedy_decoding(architecture: str) -> None:
    """Grouped heads; a window in one layer and a soft-cap; learnt positions."""
    model = tiny_model(architecture, dtype=torch.float64, vocab_size=VOCAB_SIZE, max_model_len=64)
    right = {prompt: tuple(greedy_reference(model, prompt, NEW_TOKENS)) for prompt in PROMPTS}
    assert decode(TargetModel(model), right, seed=0)[0] == right


@pytest.mark.costly("compiles a model twice")
def test_in_bfloat16_every_node_has_the_bits_of_plain_decoding_also_by_a_program_that_gives_hidden_states() -> None:
    model = tiny_model("gemma2", dtype=torch.bfloat16, vocab_size=VOCAB_SIZE, max_model_len=64)
    target = TargetModel(model, ModelOptions(compile=True))
    assert target.compiled is not None
    plain = WatchedRunner(target)

    def logits_after(tokens: tuple[int, ...]) -> torch.Tensor:
        ids = torch.tensor(tokens)
        packed = PackedInputs(
            ("plain",), ids, torch.arange(len(ids)), (0, len(ids)), (len(ids),), torch.tensor([len(ids) - 1])
        )
        logits = plain.run(packed).logits
        plain.release(["plain"])
        return logits[0]

    right = {}
    for prompt in PROMPTS:
        output: tuple[int, ...] = ()
        while len(output) < NEW_TOKENS:
            output += (int(logits_after(prompt + output).argmax()),)
        right[prompt] = output
    done, runner = decode(target, right, seed=1)
    assert done == right
    for tokens, logits in runner.seen_logits:
        assert torch.equal(logits, logits_after(tokens)), tokens
    target.prepare_hidden([0, 1])
    assert target.compiled is not None
    assert target.compiled.hidden == (0, 1)
    for tokens, logits in runner.seen_logits:
        assert torch.equal(logits, logits_after(tokens)), tokens
