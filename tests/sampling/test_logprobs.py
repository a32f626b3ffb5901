"""`SamplingParams.logprobs`: in float64, those of full passes over the text, whatever drafts and is drawn."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_none import NoneDrafter
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, TreeDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import next_logits

from emssd.decoding import logprobs as module
from emssd.decoding.engine import Engine
from emssd.decoding.logprobs import add_logprobs
from emssd.decoding.verify import verify
from emssd.drafting import Draft, Drafter
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import FinishReason, Generation, Request, Row
from tests.support import sampling as reference
from tests.support.backends import engine_of
from tests.support.spies import failing
from tests.support.trees import TREE_BACKENDS, DecoyDrafter

VOCAB, TOLERANCE = 11, 1e-9
HOT = SamplingParams(temperature=1.5, seed=7)
KINDS = [
    dataclasses.replace(HOT, logprobs=3),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=0.7, top_k=2, repetition_penalty=1.5, logit_bias={3: 2.0}, logprobs=VOCAB),
    SamplingParams(temperature=0, no_repeat_ngram_size=2, logprobs=1),
    HOT,
    None,
    dataclasses.replace(HOT, top_k=4, logprobs=2, processed_logprobs=True),
    SamplingParams(
        temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.3, logprobs=VOCAB, processed_logprobs=True
    ),
    SamplingParams(temperature=0, logprobs=1, processed_logprobs=True),
]


def requests(num_new: int = 16, **options: Any) -> list[Request]:
    return [Request(f"r{i}", (1, 2, 3, i), num_new, sampling=kind, **options) for i, kind in enumerate(KINDS)]


@cache
def target() -> TargetModel:
    """An OPT model, which computes nothing in float32."""
    return TargetModel(tiny_model("opt", vocab_size=VOCAB, max_model_len=64, std=0.12))


@cache
def logits_behind(tokens: tuple[int, ...]) -> list[float]:
    """The whole text again. By SDPA, as Transformers' eager attention takes its softmax in float32."""
    logits = next_logits(target().model, tokens, "sdpa")
    assert logits.dtype is torch.float64
    line: list[float] = logits.tolist()
    return line


@cache
def texts() -> dict[str, tuple[int, ...]]:
    """The tokens of each request, by its id."""
    return {
        one.request_id: reference.sampled(target().model, one.prompt_ids, 24, one.sampling, one.request_id)
        for one in requests()
    }


def make_engine(drafter: Drafter, backend: str = "ragged-page-3", **options: Any) -> Engine:
    return engine_of(target(), drafter, TREE_BACKENDS[backend](), trees=True, **options)


def check(done: Generation, params: SamplingParams | None) -> None:
    """Against the log-softmax of a full pass after each prefix: of the model's own logits, or of what is drawn from."""
    if params is None or params.logprobs is None:
        assert done.logprobs is None
        return
    assert done.logprobs is not None
    assert tuple(logprob.token_id for logprob in done.logprobs) == done.token_ids
    for number, logprob in enumerate(done.logprobs):
        before = (*done.prompt_ids, *done.token_ids[:number])
        logits = logits_behind(before)
        if params.processed_logprobs:
            logits = reference.scores(logits, params, before, len(done.prompt_ids))
        expected: list[float] = torch.tensor(logits, dtype=torch.float64).log_softmax(0).tolist()
        assert abs(logprob.logprob - expected[logprob.token_id]) <= TOLERANCE
        assert len(logprob.top) == params.logprobs
        assert all(abs(share - expected[token]) <= TOLERANCE for token, share in logprob.top)
        best = sorted(range(VOCAB), key=lambda token: -expected[token])[: params.logprobs]
        assert [token for token, _ in logprob.top] == best


@pytest.mark.parametrize("backend", TREE_BACKENDS)
@pytest.mark.parametrize("kind", ["none", "perfect", "decoys", "random", "trees"])
def test_they_are_the_models_own_whatever_drafts(kind: str, backend: str) -> None:
    expected = texts()
    drafter = {
        "none": NoneDrafter(),
        "perfect": PerfectDrafter(VOCAB, 5, expected),
        "decoys": DecoyDrafter(VOCAB, expected),
        "random": RandomDrafter(VOCAB, 4, expected),
        "trees": TreeDrafter(VOCAB, 6, expected),
    }[kind]
    engine = make_engine(drafter, backend, batch_size=4)
    for done in engine.run(requests()):
        assert done.token_ids == expected[done.request_id][:16]
        check(done, KINDS[int(done.request_id[1:])])
    assert bool(engine.report.num_accepted) == (kind != "none")


def test_preempted_rows_keep_theirs() -> None:
    engine = make_engine(TreeDrafter(VOCAB, 6, texts()), batch_size=6, max_tokens=63)
    for done in engine.run(requests(24)):
        check(done, KINDS[int(done.request_id[1:])])
    assert engine.report.num_preempted


def test_a_step_that_is_done_again_gives_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(RandomDrafter(VOCAB, 4))
    monkeypatch.setattr(engine.runner, "commit", commit := failing(engine.runner.commit, RuntimeError(), 2))
    engine.add(dataclasses.replace(requests()[0], max_new_tokens=12))
    ended: list[Row] = []
    while engine.has_work:
        try:
            ended += engine.step()
        except RuntimeError:
            continue
    assert commit.call_count > 3
    check(Generation.of(ended[0], None), KINDS[0])


def test_tokens_behind_an_end_have_none() -> None:
    wanted = requests()[:1]
    text = texts()["r0"]
    end = next(index for index, token in enumerate(text) if index > 3 and token not in text[:index])
    stopped = [dataclasses.replace(wanted[0], eos_token_ids=frozenset({text[end]}))]
    for done in make_engine(PerfectDrafter(VOCAB, 9, texts())).run(stopped):
        assert (done.finish_reason, len(done.token_ids)) == (FinishReason.EOS, end + 1)
        check(done, KINDS[0])


def test_nothing_is_computed_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_numbers", numbers := Mock())
    for done in make_engine(RandomDrafter(VOCAB, 4)).run(requests()[4:6]):
        assert done.logprobs is None
    numbers.assert_not_called()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_they_are_computed_in_float64_from_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    rows = [Row(Request(name, (1,), 9, sampling=SamplingParams(logprobs=2))) for name in "ab"]
    draft = Draft.from_chains([[int(logits[0].argmax())], [int(logits[2].argmin())]])
    verified = verify(logits.argmax(dim=1), rows, draft)
    add_logprobs(logits, draft, verified)
    (first, second, *more), other = (row.logprobs for row in verified)
    assert (len(more), len(other)) == (0, 1)
    for logprob, line in ((first, 0), (second, 1), (other[0], 2)):
        expected = logits[line].double() - logits[line].double().exp().sum().log()
        assert logprob.token_id == logprob.top[0][0] == int(logits[line].argmax())
        assert abs(logprob.logprob - float(expected.max())) <= 1e-12
        assert abs(logprob.top[1][1] - float(expected.sort().values[-2])) <= 1e-12


def test_behind_a_model_that_overflowed_they_are_no_numbers() -> None:
    logits = torch.full((1, 5), math.nan)
    row = Row(Request("a", (1,), 2, sampling=SamplingParams(temperature=0, logprobs=1)))
    verified = verify(torch.tensor([0]), [row], Draft.empty(1))
    add_logprobs(logits, Draft.empty(1), verified)
    (logprob,) = verified[0].logprobs
    assert math.isnan(logprob.logprob)
