"""A draft model draws with the target's noise: one that *is* the target is always right, at every level of its drafts.

Oracle of tokens: sampling written out by hand, without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from unittest.mock import Mock

import pytest
from emssd_adaptive.policy import AdaptiveBudget
from emssd_draft_model.sequoia import SequoiaShape
from emssd_testing.models import tiny_model

from emssd.decoding.engine import Engine
from emssd.draft_models import StaticShape
from emssd.draft_models.shapes import DynamicShape, Shape
from emssd.drafting import BudgetPolicy, Drafter
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from tests.support.backends import BACKENDS, engine_of
from tests.support.draft_models import DRAFT_MODEL_OPTIONS, draft_model_drafter, watch
from tests.support.sampling import kept_text
from tests.support.tiers import looped

VOCAB, MOST_NEW = 11, 31
KINDS = {
    "cool": SamplingParams(temperature=0.5, seed=1),
    "warm": SamplingParams(temperature=1.0, seed=2),
    "hot": SamplingParams(temperature=1.7, seed=3),
    "top-k": SamplingParams(temperature=1.3, top_k=3, seed=4),
    "top-p": SamplingParams(temperature=1.3, top_p=0.6, seed=5),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 1.5, 4: -1.0}, seed=6),
    "penalties": SamplingParams(repetition_penalty=1.6, frequency_penalty=0.5, no_repeat_ngram_size=3, seed=7),
    "greedy": SamplingParams(temperature=0.0),
    "greedy with a penalty": SamplingParams(temperature=0.0, repetition_penalty=1.6),
}
PROMPTS = [[3, 4, 5, 3], [6], [7, 8]]


@cache
def target(vocab_size: int = VOCAB) -> TargetModel:
    """A target whose text is hard to guess without noise."""
    return TargetModel(tiny_model("llama", vocab_size=vocab_size, max_model_len=64, std=0.15))


def sure_shapes() -> dict[str, Shape]:
    """Shapes that draft the likeliest token of every level down to the last, whatever it is."""
    return {
        "static": StaticShape([2, 1, 2]),
        "static chain": StaticShape([1, 1, 1, 1]),
        "dynamic": DynamicShape(12, 4, 3, temperature=0.01),
        "sequoia": SequoiaShape(12, 4, 3, [[0.9, 0.05, 0.03]]),
    }


def make_engine(drafter: Drafter, batch_size: int = 3, budget: BudgetPolicy | None = None) -> Engine:
    return engine_of(target(), drafter, BACKENDS["ragged-page-3"](), batch_size, budget=budget, trees=True)


def requests_of(kinds: Seq[SamplingParams | None], num_new: int) -> list[Request]:
    prompts = [tuple(PROMPTS[row % len(PROMPTS)]) for row in range(len(kinds))]
    pairs = enumerate(zip(prompts, kinds, strict=True))
    return [Request(str(row), prompt, num_new, sampling=kind) for row, (prompt, kind) in pairs]


def decode(engine: Engine, requests: Seq[Request]) -> list[Generation]:
    """Decode in order. Compare the tokens with those sampled by hand."""
    done = {generation.request_id: generation for generation in engine.run(requests)}
    for request in requests:
        expected = kept_text(target().model, request.prompt_ids, MOST_NEW, request.sampling, request.request_id)
        assert done[request.request_id].token_ids == expected[: request.max_new_tokens]
    return [done[request.request_id] for request in requests]


BATCHES: dict[str, list[SamplingParams | None]] = {name: [kind] * 3 for name, kind in KINDS.items()}
BATCHES["all kinds"] = [*KINDS.values(), None]


@pytest.mark.parametrize("batch", BATCHES)
def test_all_of_its_chains_are_accepted(batch: str) -> None:
    drafter = draft_model_drafter(target(), "chain", VOCAB)
    kinds = BATCHES[batch]
    for generation in decode(make_engine(drafter, len(kinds)), requests_of(kinds, MOST_NEW)):
        assert generation.num_accepted == generation.num_drafted == 6 * 4
        assert generation.num_steps == 7  # six full ones, and one token that was left


@pytest.mark.parametrize("kind", sure_shapes())
@looped("batch", BATCHES)
def test_at_every_level_of_its_trees_the_likeliest_token_is_accepted(batch: str, kind: str) -> None:
    shape, kinds = sure_shapes()[kind], BATCHES[batch]
    learn = shape.learn = Mock(wraps=shape.learn)  # type: ignore[method-assign]  # a spy
    drafter = draft_model_drafter(target(), shape, VOCAB)
    engine, computed = make_engine(drafter, len(kinds)), watch(drafter)
    decode(engine, requests_of(kinds, 4 * (shape.depth + 1)))
    assert engine.report.acceptance_histogram == {shape.depth + 1: 4 * len(kinds)}
    assert {rank for heard in learn.call_args_list for rank in heard.args[0]} == {0}
    assert len(computed) == 4 * shape.depth
    # A step begins with what the draft model never saw: the accepted leaf and the target's own token.
    assert [packed.lengths for packed in computed[:: shape.depth]][1:] == [[2] * len(kinds)] * 3


@looped("tree", DRAFT_MODEL_OPTIONS)
def test_what_a_policy_cuts_changes_nothing(tree: str) -> None:
    drafter = draft_model_drafter(target(), tree, VOCAB)
    engine = make_engine(drafter, budget=AdaptiveBudget())
    done = decode(engine, requests_of([KINDS["warm"], KINDS["top-k"], KINDS["penalties"], None, KINDS["hot"]], 30))
    assert sum(row.num_accepted for row in done) > 0


def test_biases_of_ids_that_only_the_target_has_are_left_out() -> None:
    small = target(VOCAB - 2)
    params = SamplingParams(logit_bias={VOCAB - 1: 5.0, 3: 1.0})
    engine = make_engine(draft_model_drafter(small, "static", VOCAB))
    assert sum(row.num_drafted for row in decode(engine, requests_of([params] * 3, 12))) > 0
