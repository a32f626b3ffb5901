"""Tokens with shared KV are those without, whatever is drafted, preempted or abandoned, on every backend with pages.

Oracle: `greedy_reference`, float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from emssd_none import NoneDrafter
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, TreeDrafter, WrongDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.attention import Kept
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting import Draft, Drafter
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import Request
from tests.support.backends import BACKENDS, MakeBackend, engine_of, runner_of
from tests.support.logged_steps import logged_steps
from tests.support.spies import failing
from tests.support.tiers import looped

VOCAB = 11
HEADER = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", vocab_size=VOCAB, max_model_len=128), frozen=True)


def build(
    target: TargetModel, make: MakeBackend, drafter: Drafter, *, batch_size: int = 4, static: bool = False, **spec: Any
) -> Engine:
    spec = {"max_step_tokens": 512, "headroom": 64, "prefix_caching": True} | spec
    return engine_of(target, drafter, make(), batch_size, static=static, **spec)


def check(engine: Engine, target: TargetModel, prompts: list[tuple[int, ...]], new_tokens: int = 8) -> None:
    for prompt, done in zip(prompts, engine.generate(prompts, new_tokens, ignore_eos=True), strict=True):
        assert list(done.token_ids) == list(greedy_reference(target.model, prompt, new_tokens))


def computed(engine: Engine) -> tuple[int, int]:
    """Tokens that were computed, and tokens of prompts that need not be."""
    return engine.report.num_tokens, engine.report.num_adopted_tokens


@pytest.fixture(params=["ragged-page-16", "ragged-fused", "paged-page-16"])
def make(request: pytest.FixtureRequest) -> MakeBackend:
    return BACKENDS[request.param]


def test_a_header_is_computed_once_per_job(target: TargetModel, make: MakeBackend) -> None:
    engine, prompts = build(target, make, NoneDrafter()), [(*HEADER, 1, token) for token in range(6)]
    check(engine, target, prompts)
    decoding = 6 * 7  # each row's first new token comes with its prompt
    assert computed(engine) == (32 + 6 * 2 + decoding, 5 * 32)
    check(engine, target, prompts[:2])
    assert computed(engine) == (2 * 2 + 2 * 7, 2 * 32), "a later job does not find the header"
    engine.runner.forget_prefixes()
    check(engine, target, prompts[:1])
    assert computed(engine) == (34 + 7, 0)


def test_the_last_token_of_a_prompt_is_always_computed(target: TargetModel, make: MakeBackend) -> None:
    engine = build(target, make, NoneDrafter(), batch_size=1)
    check(engine, target, [HEADER, HEADER, HEADER[:17], HEADER[:16]], 4)
    assert computed(engine) == (32 + 16 + 1 + 16 + 4 * 3, 16 + 16)


def test_what_a_row_generated_is_shared_too(target: TargetModel, make: MakeBackend) -> None:
    engine = build(target, make, PerfectDrafter(VOCAB), batch_size=1)
    answer = greedy_reference(target.model, HEADER[:20], 30)
    check(engine, target, [HEADER[:20], (*HEADER[:20], *answer, 1)], 30)
    assert engine.report.num_adopted_tokens == 48  # of 49: the newest token had no KV


def test_what_was_drafted_and_rejected_is_not_shared(target: TargetModel, make: MakeBackend) -> None:
    prompt = HEADER[:15]
    answer = greedy_reference(target.model, prompt, 20)
    wrong = [(answer[0] + 1) % VOCAB, *answer[1:]]
    drafter = WrongDrafter(VOCAB, 12, {prompt: answer, (*prompt, *wrong): ()})
    engine = build(target, make, drafter, batch_size=1)
    check(engine, target, [prompt, (*prompt, *wrong)], 2)
    assert engine.report.num_drafted
    assert engine.report.num_adopted_tokens == 0


def test_a_page_is_not_shared_before_its_last_token_has_kv(target: TargetModel, make: MakeBackend) -> None:
    engine, prompt = build(target, make, NoneDrafter(), batch_size=1), HEADER[:31]
    check(engine, target, [prompt], 1)  # the 32nd token ends it
    check(engine, target, [(*prompt, *greedy_reference(target.model, prompt, 1), 1)])
    assert engine.report.num_adopted_tokens == 16


def test_rows_that_begin_alike_wait_for_the_first_of_them_and_others_do_not(
    target: TargetModel, make: MakeBackend
) -> None:
    engine, other = build(target, make, NoneDrafter()), tuple(reversed(HEADER))
    for name, prompt in {"a": (*HEADER, 1), "b": (*HEADER, 2), "c": (*other, 1), "d": HEADER[:16]}.items():
        engine.add(Request(name, prompt, 3))
    rows = {row.request_id: row for row in engine.scheduler._waiting}
    engine.step()
    assert {name: row.num_cached for name, row in rows.items()} == {"a": 33, "b": 0, "c": 33, "d": 16}
    engine.step()
    assert rows["b"].num_cached == 33
    assert engine.report.num_adopted_tokens == 32


def test_static_batches_share_with_earlier_ones(target: TargetModel, make: MakeBackend) -> None:
    engine = build(target, make, NoneDrafter(), batch_size=2, static=True)
    check(engine, target, [(*HEADER, token) for token in range(4)])
    assert engine.report.num_adopted_tokens == 2 * 32


def test_shared_pages_count_once_so_that_more_rows_run(target: TargetModel, make: MakeBackend) -> None:
    rows = [0, 0]
    for caching in (False, True):
        spec = target.kv_cache_spec(4)
        page = make().bytes_per_token(spec) * 16  # heads may be padded
        max_tokens = -(-8 * page // spec.bytes_per_token())  # a page less where the pool is fixed, for padding
        engine = build(target, make, NoneDrafter(), max_tokens=max_tokens, prefix_caching=caching)
        engine.scheduler = ContinuousScheduler(4, 512, worst_case=True)
        with logged_steps(engine) as steps:
            check(engine, target, [(*HEADER, token) for token in range(8)], 9)
        rows[caching] = max(step.num_rows for step in steps)
        assert engine.report.num_preempted == 0
    assert rows == [2, 4], "a row takes three pages, and with a shared header one of its own"


@looped("drafter", [RandomDrafter(VOCAB, seed=1), TreeDrafter(VOCAB, seed=1)])
def test_a_text_with_nan_is_shared_and_nobody_else_sees_it(make: MakeBackend, drafter: Drafter) -> None:
    model = tiny_model("llama", vocab_size=VOCAB, max_model_len=128)
    with torch.no_grad():
        model.get_input_embeddings().weight[10] = float("nan")
    target = TargetModel(model)
    foul, fair = (*HEADER[:20], 10, *HEADER[:20]), HEADER
    alone = build(target, make, NoneDrafter(), prefix_caching=False).generate([foul], 8, ignore_eos=True)[0]
    engine = build(target, make, drafter)
    done = engine.generate([foul, (*fair, 1), foul, (*fair, 2), (*fair, 3), foul], 8, ignore_eos=True)
    for generation in done:
        prompt = tuple(generation.prompt_ids)
        expected = alone.token_ids if prompt == foul else greedy_reference(model, prompt, 8)
        assert list(generation.token_ids) == list(expected)
    assert engine.report.num_adopted_tokens >= 2 * 32 + 16 + 32 + 32


@pytest.mark.parametrize("name", ["padded", "unpad_both", "dense"])
def test_backends_without_pages_do_without(target: TargetModel, name: str) -> None:
    engine = build(target, BACKENDS[name], NoneDrafter(), static=True)
    check(engine, target, [(*HEADER, 1), (*HEADER, 2)])
    assert engine.report.num_adopted_tokens == 0


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "opt"])
def test_windows_and_learned_positions(architecture: str, make: MakeBackend) -> None:
    target = TargetModel(tiny_model(architecture, vocab_size=VOCAB, max_model_len=128))
    engine = build(target, make, RandomDrafter(VOCAB, seed=2))
    check(engine, target, [(*HEADER, token) for token in range(6)])
    assert engine.report.num_adopted_tokens == 5 * 32


@pytest.mark.parametrize(("caching", "expected"), [(True, 32), (False, 0)])
def test_it_is_an_option_of_the_engine(caching: bool, expected: int) -> None:
    engine = Engine.from_model(tiny_model(), drafter="none", backend="ragged", prefix_caching=caching)
    for _ in engine.run([Request(name, (*HEADER, number), 2) for number, name in enumerate("ab")]):
        pass
    assert engine.report.num_adopted_tokens == expected


def test_a_step_that_fails_where_rows_are_chosen_leaves_nothing_behind(
    target: TargetModel, make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(target, make, NoneDrafter(), batch_size=2)
    check(engine, target, [(*HEADER, 1)])
    engine.add(Request("a", (*HEADER, 2), 4))
    engine.add(Request("b", (*HEADER, 3), 4))
    monkeypatch.setattr(engine.runner, "fits", failing(engine.runner.fits, RuntimeError("the first time"), 0))
    with pytest.raises(RuntimeError, match="the first time"):
        engine.step()
    assert engine.scheduler.num_waiting == 2
    done = {row.request_id: row.output_ids for _ in range(9) for row in engine.step()}
    assert done == {name: list(greedy_reference(target.model, (*HEADER, n), 4)) for name, n in (("a", 2), ("b", 3))}
    assert engine.runner.usage.held == 0


@dataclasses.dataclass
class Row:
    request_id: str
    tokens: list[int]
    num_cached: int = 0


@looped("name", ["ragged-page-1", "ragged-page-3", "ragged-fused", "paged-grows", "paged-recorded"])
def test_who_is_cut_back_into_a_shared_page_writes_into_a_copy(target: TargetModel, name: str) -> None:
    """No row of an engine is cut back so far, and a backend is right all the same."""

    def runner() -> CausalLMRunner:
        return runner_of(target, BACKENDS[name](), 2, prefix_caching=True)

    def step(on: CausalLMRunner, *rows: Row) -> torch.Tensor:
        with torch.inference_mode():
            logits = on.run(pack(rows, Draft.empty(len(rows)))).logits.clone()
            on.commit(Kept(tuple(row.request_id for row in rows), tuple(len(row.tokens) for row in rows)))
        return logits

    sharing, text = runner(), list(HEADER)
    step(sharing, Row("a", text))
    sharing.backend.publish_prefix("a", text)
    adopted = sharing.backend.adopt_prefix("b", [*text, 7], 0)
    assert 30 <= adopted <= 32  # whole pages of 1, 3, 4 or 16 tokens
    other = [*text[: adopted - 1], 10, 2]
    changed = step(sharing, Row("b", other, adopted - 1))
    unchanged = step(sharing, Row("a", [*text, 6], len(text)))
    fresh = runner()
    assert torch.allclose(changed, step(fresh, Row("b", other))[-1:], atol=1e-9)
    assert torch.allclose(unchanged, step(fresh, Row("a", [*text, 6]))[-1:], atol=1e-9)
