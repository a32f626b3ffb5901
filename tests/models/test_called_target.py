"""A drafter may call the target: it gets the model's own logits, whatever runs, and the engine's tokens stay."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from emssd_padded import PaddedConfig

from emssd.decoding.engine import Engine
from emssd.drafting import Draft, Drafter, Outcome
from emssd.model import BorrowedTarget
from emssd.sequences import Batch
from emssd.testing.models import tiny_model
from emssd.testing.oracle import greedy_reference

PROMPTS = [[1, 5, 6, 7, 5, 6, 7], [9], [3] * 12, [8, 2, 8, 4, 8]]


class Foresees(Drafter):
    """Drafts what the target itself says, and asks it in `observe` as well: by a call of its own, with a cache."""

    num_speculative_tokens = 3
    target: BorrowedTarget

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        chains = []
        for row, limit in zip(batch, budget, strict=True):
            text = list(row.tokens)
            for _ in range(limit):
                text.append(int(self.target.logits(torch.tensor(text))[-1].argmax()))
            chains.append(text[len(row.tokens) :])
        return Draft.from_chains(chains)

    def observe(self, outcome: Outcome) -> None:
        for row in outcome.batch:
            ids = torch.tensor(row.tokens)
            said: Any = self.target.model(ids.unsqueeze(0), use_cache=True)
            assert said.past_key_values.get_seq_length() == len(ids)
            torch.testing.assert_close(said.logits[0], self.target.logits(ids))


@pytest.mark.parametrize("backend", ["ragged", PaddedConfig()], ids=["ragged", "padded"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])
def test_by_a_drafter_that_is_then_always_right(kind: str, backend: Any) -> None:
    model, drafter = tiny_model(kind, max_model_len=64), Foresees()
    options = {"budget": "fixed", "on_drafter_error": "fail"}
    engine = Engine.from_model(model, drafter=drafter, backend=backend, batch_size=3, **options)
    drafter.target = BorrowedTarget(engine.target)
    before = model.config._attn_implementation
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, 12, ignore_eos=True), strict=True):
        assert list(done.token_ids) == greedy_reference(model, prompt, 12)
    assert engine.report.num_accepted == engine.report.num_drafted > 10
    assert model.config._attn_implementation == before
