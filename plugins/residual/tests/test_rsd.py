"""Trees that a draft model draws: from the distributions that it tells, and one after the other, whatever is left out.

Oracle of distributions: processing written out by hand, on logits of the model's own eager attention. float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from emssd_residual.drafter import BeamShape, ChildrenShape, SampledShape
from emssd_testing.models import tiny_model

from emssd.decoding.engine import Engine
from emssd.drafting import Draft, Drafter
from emssd.drafting.budget import FixedBudget
from emssd.model import TargetModel
from emssd.sampling import SamplingMethod, SamplingParams
from emssd.sequences import Batch, Request, Row
from tests.support import sampling as reference
from tests.support.backends import BACKENDS, engine_of
from tests.support.draft_models import draft_model_drafter
from tests.support.tiers import looped

VOCAB = 11
PROMPT = (3, 4, 5, 3)
WARM = SamplingParams(temperature=1.2, method=SamplingMethod.residual, seed=1)
KINDS = {
    "warm": WARM,
    "top-k": replace(WARM, top_k=3),
    "top-p": replace(WARM, top_p=0.5),
    "one token": replace(WARM, top_k=1),
    "bias": replace(WARM, logit_bias={3: 1.5, 4: -1.0, VOCAB - 1: 2.0}),
    "penalties": replace(WARM, repetition_penalty=1.6, frequency_penalty=0.5, no_repeat_ngram_size=3),
}
SHAPES: dict[str, SampledShape] = {
    "chain": ChildrenShape([1, 1, 1]),
    "rsd_c": ChildrenShape([3, 2, 1]),
    "rsd_s": BeamShape(3, 3),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


@cache
def model(vocab_size: int = VOCAB, seed: int = 1) -> TargetModel:
    return TargetModel(tiny_model("llama", vocab_size=vocab_size, max_model_len=64, std=0.15, seed=seed))


def row_of(params: SamplingParams, number: int = 0, length: int = 20) -> Row:
    return Row(Request(str(number), PROMPT, length, sampling=params))


def drafted(shape: str, rows: list[Row], limit: int = 99, vocab_size: int = VOCAB) -> Draft:
    drafter = draft_model_drafter(model(vocab_size), SHAPES[shape], VOCAB)
    return drafter.propose(Batch(tuple(rows)), [limit] * len(rows))


def nodes(draft: Draft, row: int) -> list[tuple[int, int]]:
    return list(zip(draft.tokens(row), draft.tree(row), strict=True))


@shapes
@looped("vocab_size", [VOCAB, VOCAB - 2])
@looped("kind", KINDS)
def test_it_tells_what_it_drew_from(kind: str, vocab_size: int, shape: str) -> None:
    params = KINDS[kind]
    draft = drafted(shape, [row_of(params)], vocab_size=vocab_size)
    assert draft.confidence is None
    q = draft.extra[0].q
    texts = [PROMPT]
    for token, parent in nodes(draft, 0):
        texts.append((*texts[parent + 1], token))
    possible = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
    for index in {parent + 1 for parent in draft.tree(0)}:
        logits = reference.logits_behind(model(vocab_size).model, texts[index])
        scores = reference.scores(logits, replace(params, logit_bias=possible), texts[index], len(PROMPT))
        expected = [*reference.probabilities(scores), *[0.0] * (VOCAB - vocab_size)]
        shares = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(q[index], shares, rtol=1e-6, atol=1e-7)  # Llama's norms are computed in float32
        children = [token for token, parent in nodes(draft, 0) if parent == index - 1]
        assert len(set(children)) == len(children)
        assert all(q[index][token] > 0 for token in children)


@shapes
def test_a_smaller_limit_gives_the_beginning_of_the_same_tree(shape: str) -> None:
    rows = [row_of(WARM, number) for number in range(3)]
    whole = drafted(shape, rows)
    assert whole.lengths == [SHAPES[shape].num_nodes] * 3
    for limit in range(1, SHAPES[shape].num_nodes):
        part = drafted(shape, rows, limit)
        for row in range(3):
            assert nodes(part, row) == nodes(whole, row)[:limit]


@shapes
def test_the_first_node_has_the_law_that_it_tells(shape: str) -> None:
    """A G-test over seeds."""
    rows = [row_of(replace(WARM, seed=seed), seed) for seed in range(600)]
    drafter = draft_model_drafter(model(), SHAPES[shape], VOCAB)
    firsts, (drawn,) = list[int](), drafter.propose(Batch((rows[0],)), [4]).extra
    for start in range(0, len(rows), 5):
        batch = Batch(tuple(rows[start : start + 5]))
        draft = drafter.propose(batch, [1] * 5)
        firsts += draft.token_ids.tolist()
        drafter.release(batch.request_ids)
    counts = torch.bincount(torch.tensor(firsts), minlength=VOCAB).double()
    statistic = 2 * torch.special.xlogy(counts, counts / (len(rows) * drawn.q[0].detach())).sum()
    assert float(torch.special.gammaincc(torch.tensor((VOCAB - 1) / 2).double(), statistic / 2)) > 1e-3


@shapes
def test_other_rows_get_the_most_probable_tokens_and_no_distributions(shape: str) -> None:
    rows = [row_of(WARM), Row(Request("greedy", PROMPT, 20))]
    draft = drafted(shape, rows)
    assert draft.extra[1] is None
    assert nodes(draft, 0) == nodes(drafted(shape, rows[:1]), 0)
    logits = reference.logits_behind(model().model, PROMPT)
    first = [token for token, parent in nodes(draft, 1) if parent < 0]
    assert first == sorted(range(VOCAB), key=lambda token: -logits[token])[: len(first)]


def make_engine(drafter: Drafter, batch_size: int = 4) -> Engine:
    return engine_of(model(seed=0), drafter, BACKENDS["ragged-page-3"](), batch_size, budget=FixedBudget(), trees=True)


@shapes
def test_a_draft_model_that_is_the_target_is_accepted_to_the_end(shape: str) -> None:
    """Block and traversal verification accept the deepest way if the distributions are equal."""
    drafter = draft_model_drafter(model(seed=0), SHAPES[shape], VOCAB)
    requests = [Request(str(i), PROMPT, 21, sampling=params) for i, params in enumerate([WARM, KINDS["penalties"]])]
    for done in make_engine(drafter).run(requests):
        assert done.num_accepted + done.num_steps >= 21
        assert done.num_steps <= -(-21 // 4) + 1


@shapes
@looped("batch_size", [1, 3])
def test_the_text_is_the_same_at_every_batch_size(shape: str, batch_size: int) -> None:
    requests = [Request(str(i), PROMPT[: 1 + i % 4], 20, sampling=WARM) for i in range(4)]
    texts = []
    for size in (4, batch_size):
        engine = make_engine(draft_model_drafter(model(), SHAPES[shape], VOCAB), size)
        texts.append({done.request_id: done.token_ids for done in engine.run(requests)})
    assert texts[0] == texts[1]
