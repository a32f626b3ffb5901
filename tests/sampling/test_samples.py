"""`SamplingParams.n`: each sample is the text that it would be alone, and the prompt of all is computed once."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import StaticScheduler
from emssd.drafting import Drafter
from emssd.errors import ConfigError
from emssd.model import CausalLMRunner
from emssd.sequences import Request
from emssd.testing.drafters import RandomDrafter, TreeDrafter
from tests.sampling.test_engine import HOT, VOCAB, make_engine, target
from tests.support import sampling as reference
from tests.support.backends import BACKENDS
from tests.support.tiers import looped
from tests.support.trees import TREE_BACKENDS

PROMPTS = [(1, 2, 3, 4), (5,), (1, 2, 3, 4)]
FOUR = dataclasses.replace(HOT, n=4)


@cache
def by_hand(prompt: tuple[int, ...], request_id: str, sample: int, num_new: int = 12) -> tuple[int, ...]:
    return reference.sampled(target().model, prompt, num_new, HOT, request_id, sample=sample)


@pytest.mark.parametrize("backend", TREE_BACKENDS)
@pytest.mark.parametrize("drafter", [RandomDrafter(VOCAB, 4), TreeDrafter(VOCAB, 6, seed=1)], ids=["chains", "trees"])
def test_they_are_told_apart_by_number_and_stand_behind_one_another(backend: str, drafter: Drafter) -> None:
    done = make_engine(drafter, TREE_BACKENDS[backend], batch_size=5).generate(PROMPTS, 12, sampling=FOUR)
    places = [(prompt, str(i), sample) for i, prompt in enumerate(PROMPTS) for sample in range(4)]
    assert [(each.prompt_ids, each.request_id, each.sample) for each in done] == places
    assert [each.token_ids for each in done] == [by_hand(*place) for place in places]
    assert len({each.token_ids for each in done}) == len(done)
    assert {each.seed for each in done} == {HOT.seed}


def test_the_first_is_the_text_of_a_single_one_and_more_change_none() -> None:
    def texts(n: int) -> list[tuple[int, ...]]:
        params = dataclasses.replace(HOT, n=n)
        return [
            each.token_ids for each in make_engine(RandomDrafter(VOCAB, 4)).generate(PROMPTS[:1], 12, sampling=params)
        ]

    assert texts(4)[:1] == texts(1)
    assert texts(4)[:2] == texts(2)


def test_preempted_ones_go_on_with_the_same_text() -> None:
    engine = make_engine(RandomDrafter(VOCAB, 5), batch_size=5, max_tokens=63)
    done = engine.generate([(1, 2, 3, 4)], 24, sampling=dataclasses.replace(HOT, n=5))
    assert engine.report.num_preempted
    assert [each.token_ids for each in done] == [by_hand((1, 2, 3, 4), "0", sample, 24) for sample in range(5)]


def sharing_engine(*, static: bool = False, batch_size: int = 8) -> Engine:
    backend = BACKENDS["ragged-page-16"]()
    spec = target().kv_cache_spec(batch_size)
    backend.allocate(dataclasses.replace(spec, continuous=not static, prefix_caching=True))
    scheduler = StaticScheduler(batch_size) if static else None
    drafter = RandomDrafter(VOCAB, 3)
    return Engine(CausalLMRunner(target(), backend), drafter, batch_size=batch_size, scheduler=scheduler)


@looped(("length", "shared"), [(40, 32), (32, 16), (33, 32), (15, 0)])
def test_all_start_together_and_the_prompts_whole_pages_are_computed_once(length: int, shared: int) -> None:
    """The last token of a prompt is always computed, as its logits are wanted: of 32 tokens 16 are shared."""
    engine, prompt = sharing_engine(), tuple(token % VOCAB for token in range(length))
    done = engine.generate([prompt], 4, sampling=dataclasses.replace(HOT, n=6))
    assert engine.report.num_adopted_tokens == 5 * shared
    assert [each.token_ids for each in done] == [by_hand(prompt, "0", sample, 4) for sample in range(6)]


def test_whoever_drives_the_loop_gets_all_of_them() -> None:
    engine, ended = make_engine(RandomDrafter(VOCAB, 3)), {}
    engine.add(Request("a", (1, 2), 5, sampling=dataclasses.replace(HOT, n=3)))
    while engine.has_work:
        ended |= {(row.request.prompt_id, row.request.sample): tuple(row.output_ids) for row in engine.step()}
    assert ended == {("a", sample): by_hand((1, 2), "a", sample, 5) for sample in range(3)}


def test_a_request_that_is_called_like_a_sample_is_refused() -> None:
    engine = make_engine(RandomDrafter(VOCAB, 3))
    asked = [Request("a", (1,), 2, sampling=FOUR), Request("a#1", (1,), 2)]
    with pytest.raises(ConfigError, match="two requests have the same request_id 'a#1'"):
        engine.run(asked)
    engine.add(asked[1])
    with pytest.raises(ConfigError, match="request 'a#1' is there already"):
        engine.add(asked[0])
    assert engine.scheduler.num_waiting == 1
