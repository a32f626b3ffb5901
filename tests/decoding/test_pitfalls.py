"""The ten ways in which batched speculative decoding has been got wrong, each with its test, or several.

Oracle: `greedy_reference`, eager attention without a cache, float64, of equal logits the lowest id.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_llma import LLMAConfig, LLMADrafter, Occurrence, Search
from emssd_none import NoneDrafter
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, WrongDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

import emssd
from emssd.attention import AttentionBackend, PackedInputs, StepPlan
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.model import CausalLMRunner, TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import FinishReason, Request, Row
from tests.support.backends import runner_of
from tests.support.oracle import build
from tests.support.sampling import sampled
from tests.support.tiers import looped

MakeBackend = Callable[[], AttentionBackend]


def outputs(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in engine.generate(prompts, max_new_tokens)]


def test_1_positions_are_those_of_the_real_tokens_and_not_of_padded_ones(
    oracle: Any, make_backend: MakeBackend, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = RandomDrafter(11, 5, oracle.references(prompts, 12), seed=1)
    engine = build(oracle, make_backend, drafter, batch_size=5)
    plan, begun = engine.runner.backend.plan, set[str]()

    def checked(packed: PackedInputs) -> StepPlan:
        planned = plan(packed)
        rows = {row.request_id: row for row in engine.scheduler.select(engine.runner.backend.fits, 0).batch}
        expected = []
        for name, kv_len in zip(packed.request_ids, packed.kv_lens, strict=True):
            first = len(rows[name].tokens) - 1 if name in begun else 0  # the first step computes the prompt
            expected.append(list(range(first, kv_len)))
        begun.update(packed.request_ids)
        if len(planned.position_ids) == 1:
            fed = planned.position_ids[0].tolist()
            assert fed[: packed.num_tokens] == [position for row in expected for position in row]
            assert len(fed) == packed.num_tokens or planned.replay is not None, "only recorded steps are padded"
        else:
            rectangle = [sorted(set(row)) for row in planned.position_ids.tolist()]
            assert rectangle == expected, "padding repeats a position of its row"
        return planned

    monkeypatch.setattr(engine.runner.backend, "plan", checked)
    together = outputs(engine, prompts, 12)
    alone = build(oracle, make_backend, NoneDrafter(), batch_size=1)
    assert together == outputs(alone, prompts, 12)


def test_2_after_each_step_the_cache_equals_a_fresh_prefill(
    oracle: Any, make_backend: MakeBackend, prompts: list[list[int]]
) -> None:
    drafter = RandomDrafter(11, 5, oracle.references(prompts, 12), seed=2)
    engine = build(oracle, make_backend, drafter, batch_size=5)
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), 12))
    num_checked = 0
    while True:
        engine.step()
        rows = list(engine.scheduler.select(engine.runner.backend.fits, 0).batch)
        if not any(row.num_steps for row in rows):
            break
        with torch.inference_mode():
            for row in rows:
                assert row.num_cached == len(row.tokens) - 1
            # A copy, so that looking at the cache does not write to it; the probe reads all of it, through attention.
            used, fresh = copy.deepcopy(engine.runner.backend), make_backend()
            fresh.allocate(oracle.target.kv_cache_spec(5))
            probe = Draft.from_chains([[1, 2, 3]] * len(rows))
            from_cache = oracle.target(used.plan(pack(rows, probe)), used)
            anew = [Row(Request(row.request_id, tuple(row.tokens), 1)) for row in rows]
            from_scratch = oracle.target(fresh.plan(pack(anew, probe)), fresh)
        torch.testing.assert_close(from_cache, from_scratch, atol=1e-10, rtol=0)
        num_checked += 1
    assert num_checked > 3
    assert engine.report.num_accepted > 10
    assert engine.report.num_accepted < engine.report.num_drafted


def test_3_an_always_wrong_drafter_gives_one_token_a_step_and_the_same_output(
    oracle: Any, make_backend: MakeBackend, prompts: list[list[int]]
) -> None:
    references = oracle.references(prompts, 9)
    engine = build(oracle, make_backend, WrongDrafter(11, 4, references))
    for generation in engine.generate(prompts, 9):
        assert generation.token_ids == references[generation.request_id]
        assert generation.num_steps == 9
        assert generation.num_accepted == 0
        assert generation.num_drafted == 4 * 5 + 3 + 2 + 1
    assert engine.report.acceptance_histogram == {1: 9 * 5}


@pytest.mark.parametrize("k", [1, 2, 4])
def test_4_with_the_target_as_draft_model_everything_is_accepted(
    k: int, oracle: Any, make_backend: MakeBackend, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_backend = make_backend()
    draft_backend.allocate(oracle.target.kv_cache_spec(5))
    plan, plan_chain, computed = Mock(wraps=draft_backend.plan), draft_backend.plan_chain, list[int]()

    def passes(packed: PackedInputs, lengths: Seq[int]) -> list[StepPlan]:
        plans = plan_chain(packed, lengths)
        computed.append(sum(lengths) if plans else 0)
        return plans

    monkeypatch.setattr(draft_backend, "plan", plan)
    monkeypatch.setattr(draft_backend, "plan_chain", passes)
    drafter = DraftModelDrafter(CausalLMRunner(oracle.target, draft_backend), 11, k)
    engine = build(oracle, make_backend, drafter, batch_size=5)
    n = 4 * (k + 1)
    done = engine.generate(prompts, n)
    assert [generation.token_ids for generation in done] == [oracle.reference(prompt, n) for prompt in prompts]
    assert engine.report.acceptance_histogram == {k + 1: 4 * 5}
    assert engine.report.mean_acceptance_length == k + 1
    # Nothing is computed twice: prompts and k - 1 drafts at first, then the last draft, the bonus, and k - 1 drafts.
    computed += [call.args[0].num_tokens for call in plan.call_args_list]
    assert sum(computed) == sum(len(prompt) + k - 1 + 3 * (k + 1) for prompt in prompts)
    assert draft_backend.kv_usage.held == 0


@looped("place", range(6))
def test_5_eos_inside_an_accepted_run_ends_the_sequence_there(
    place: int, oracle: Any, make_backend: MakeBackend, prompts: list[list[int]]
) -> None:
    references = oracle.references(prompts, 10)
    eos = {references["0"][place]}
    engine = build(oracle, make_backend, PerfectDrafter(11, 4, references), eos_token_ids=eos)
    done = engine.generate(prompts, 10)
    assert [generation.token_ids for generation in done] == [oracle.reference(prompt, 10, eos) for prompt in prompts]
    assert done[0].finish_reason is FinishReason.EOS
    assert len(done[0].token_ids) == references["0"].index(references["0"][place]) + 1


def test_6_finished_rows_are_neither_drafted_for_nor_computed_and_rows_may_move(
    oracle: Any, make_backend: MakeBackend, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [9, 1, 5, 14, 2]
    requests = [Request(str(i), tuple(p), n) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    expected = {
        request.request_id: oracle.reference(request.prompt_ids, request.max_new_tokens) for request in requests
    }
    shuffle = random.Random(0)
    for order in range(4):
        drafter: Any = RandomDrafter(11, 4, oracle.references(prompts, 14), seed=order)
        drafter.observe = Mock(wraps=drafter.observe)
        engine = build(oracle, make_backend, drafter, batch_size=5)
        finished, plan = set[str](), Mock(wraps=engine.runner.backend.plan)
        monkeypatch.setattr(engine.runner.backend, "plan", plan)
        for generation in engine.run(requests):
            assert generation.token_ids == expected[generation.request_id]
            finished.add(generation.request_id)
        assert finished == set(expected)
        planned = [call.args[0].request_ids for call in plan.call_args_list]
        verified = [call.args[0].batch.request_ids for call in drafter.observe.call_args_list]
        for row in expected:
            steps = [i for i, names in enumerate(planned) if row in names]
            assert steps == [i for i, names in enumerate(verified) if row in names]
            assert steps == list(range(len(steps))), "a row computes from the first step on until it is finished"
        assert len({len(names) for names in planned}) > 2, "rows finish at different times"
        shuffle.shuffle(requests)


@looped("seed", range(10))
def test_7_no_token_reads_kv_that_its_own_step_has_not_written_yet(
    seed: int, oracle: Any, make_backend: MakeBackend, prompts: list[list[int]]
) -> None:
    # Prompts of 1, 9 and 20 tokens, of which later ones draft, and rows without drafts share a step.
    mixed = [prompts[2], prompts[1], prompts[4]]
    engine = build(oracle, make_backend, RandomDrafter(11, 6, oracle.references(mixed, 7), seed=seed), batch_size=3)
    assert outputs(engine, mixed, 7) == [oracle.reference(prompt, 7) for prompt in mixed]


@looped("occurrence", list(Occurrence))
def test_8_holes_are_no_context_so_that_padding_changes_no_acceptance(
    occurrence: Occurrence, oracle: Any, make_backend: MakeBackend, make_ragged: MakeBackend, prompts: list[list[int]]
) -> None:
    config = LLMAConfig(1, 4, Search.prompt_and_output, occurrence, require_full_copy=False)
    traces = []
    for make in (make_ragged, make_backend):
        drafter: Any = LLMADrafter(config)
        drafter.observe = Mock(wraps=drafter.observe)
        engine = build(oracle, make, drafter, batch_size=5)
        assert outputs(engine, prompts, 24) == [oracle.reference(prompt, 24) for prompt in prompts]
        heard = [call.args[0] for call in drafter.observe.call_args_list]
        traces.append([(step.batch.request_ids, step.draft.lengths, [*map(len, step.accepted)]) for step in heard])
    assert traces[0] == traces[1]
    assert engine.report.num_accepted > 5
    assert engine.report.num_accepted < engine.report.num_drafted


@cache
def low_precision(dtype: torch.dtype, prompts: tuple[tuple[int, ...], ...]) -> tuple[TargetModel, dict[str, list[int]]]:
    """A target, and what its model generates after each of `prompts`."""
    model = tiny_model("llama", vocab_size=61, dtype=dtype, max_model_len=64)
    return TargetModel(model), {str(i): greedy_reference(model, prompt, 12) for i, prompt in enumerate(prompts)}


@looped(("dtype", "largest_tie"), [(torch.float64, 0.0), (torch.float32, 1e-4), (torch.bfloat16, 0.25)])
@looped("drafting", [True, False])
def test_9_where_precision_is_low_the_first_difference_is_a_tie(
    drafting: bool, dtype: torch.dtype, largest_tie: float, make_backend: MakeBackend, prompts: list[list[int]]
) -> None:
    """`largest_tie`: between the reference's choice and ours, in the reference's logits. The control drafts nothing."""
    target, references = low_precision(dtype, tuple(map(tuple, prompts)))
    drafter = RandomDrafter(61, 4, references) if drafting else NoneDrafter()
    done = Engine(runner_of(target, make_backend(), 5), drafter, batch_size=5).generate(prompts, 12)
    for generation in done:
        reference = references[generation.request_id]
        agreed = 0
        while agreed < 12 and generation.token_ids[agreed] == reference[agreed]:
            agreed += 1
        if agreed < 12:
            inputs = torch.tensor([[*generation.prompt_ids, *reference[:agreed]]])
            with torch.inference_mode():
                logits = target.model(input_ids=inputs, use_cache=False).logits[0, -1].double()
            assert float(logits[reference[agreed]] - logits[generation.token_ids[agreed]]) <= largest_tie


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}],
    ids=str,
)
def test_10_sampling_and_penalties_are_those_of_the_target_alone(options: dict[str, Any], oracle: Any) -> None:
    model, prompt = oracle.target.model, (1, 3, 4, 1, 3)
    got = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, pad_token_id=0, eos_token_id=None, do_sample=True, seed=5,
        custom_generate=emssd.custom_generate, drafter=LLMAConfig(match_length=1, copy_length=4), **options
    )  # fmt: skip
    assert tuple(got[0, len(prompt) :].tolist()) == sampled(model, prompt, 20, SamplingParams(seed=5, **options), "0")
