"""Batches of any history, after an untimed start, and with drafts whose ids the host has not seen: the tokens stay.

Oracle: `greedy_reference`, eager attention without a cache, float64, of equal logits the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from emssd_ragged.backend import ragged_backend
from emssd_suffix import SuffixConfig
from emssd_suffix.drafter import SuffixDrafter
from emssd_testing.drafters import PerfectDrafter, RandomDrafter

from emssd.decoding.engine import Engine
from emssd.decoding.warmup import warm_up
from emssd.drafting import Draft, Drafter
from emssd.drafting.budget import FixedBudget
from emssd.errors import DraftError, PluginError, PluginWarning
from emssd.metrics.stats import RunReport
from emssd.sequences import Batch, Request
from tests.support.backends import runner_of
from tests.support.oracle import build

PROMPTS = [[5, 6, 7] * 6, [9], [4, 4, 4, 4], [8, 10]]


def engine_of(oracle: Any, *drafters: Drafter, on_drafter_error: str = "fail") -> Engine:
    runner = runner_of(oracle.target, ragged_backend(), 2)
    return Engine(runner, list(drafters), batch_size=2, budget=FixedBudget(), on_drafter_error=on_drafter_error)


def requests() -> list[Request]:
    return [Request(str(i), tuple(ids), 20) for i, ids in enumerate(PROMPTS)]


def test_a_cache_of_outputs_is_empty_again(oracle: Any) -> None:
    config = SuffixConfig(4, 12, cache_tokens=400)
    cold, warm = (engine_of(oracle, SuffixDrafter(config)) for _ in range(2))
    warm_up(warm, requests())
    assert warm.report == RunReport()
    drafted = []
    for engine in (cold, warm):
        for _ in engine.run(requests()):
            pass
        drafted.append((engine.report.draft_length_histogram, engine.report.acceptance_histogram))
    assert drafted[0] == drafted[1]
    for _ in cold.run(requests()):  # not in vain: with what it has learnt it drafts something else
        pass
    assert cold.report.draft_length_histogram != drafted[0][0]


class Stubborn(RandomDrafter):
    def reset(self) -> None:
        raise KeyError("lost")


def test_every_drafter_is_told_and_one_that_fails_is_named(oracle: Any) -> None:
    suffix = SuffixDrafter(SuffixConfig(4, 12, cache_tokens=400))
    with pytest.raises(PluginError, match=r"drafter Stubborn failed in reset: KeyError: 'lost'"):
        warm_up(engine_of(oracle, suffix, Stubborn(oracle.target.vocab_size, 3, seed=0)), requests())
    engine = engine_of(oracle, Stubborn(oracle.target.vocab_size, 3, seed=0), suffix, on_drafter_error="disable")
    with pytest.warns(PluginWarning, match="failed in reset"):
        warm_up(engine, requests())
    assert engine.drafting.drafters[0].failure is not None
    assert suffix._cache is not None
    assert not suffix._cache._generations


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are taken for ones on a device."""
    monkeypatch.setattr(Draft, "on_host", property(lambda self: False))


class OutOfVocabulary(Drafter):
    """Its second token is none."""

    num_speculative_tokens = 3

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains([[1, self.wrong, 2][:limit] for limit in budget])


def test_ids_are_forced_into_the_vocabulary_for_the_model_only(unseen: None) -> None:
    draft = Draft.from_chains([[-1, 4], [99]])
    assert draft.within(10).token_ids.tolist() == [0, 4, 9]
    assert draft.token_ids.tolist() == [-1, 4, 99]


@pytest.mark.usefixtures("unseen")
class TestEngine:
    def test_tokens_are_those_of_greedy_decoding(self, oracle: Any, make_ragged: Any, prompts: list[list[int]]) -> None:
        drafter = RandomDrafter(oracle.vocab_size, 4, oracle.references(prompts, 12), seed=0)
        outputs = build(oracle, make_ragged, drafter).generate(prompts, 12)
        assert [output.token_ids for output in outputs] == [oracle.reference(prompt, 12) for prompt in prompts]

    def test_of_several_drafters_the_one_that_drafted_it_is_named(
        self, oracle: Any, make_ragged: Any, prompts: list[list[int]]
    ) -> None:
        first = PerfectDrafter(oracle.vocab_size, 3, {"0": oracle.reference(prompts[0], 12)})
        engine = build(oracle, make_ragged, [first, OutOfVocabulary(11)], on_drafter_error="disable")
        with pytest.warns(PluginWarning) as warned:
            outputs = engine.generate(prompts, 12)
        assert [str(warning.message).split()[1] for warning in warned] == ["OutOfVocabulary"]
        assert [output.token_ids for output in outputs] == [oracle.reference(prompt, 12) for prompt in prompts]

    @pytest.mark.parametrize("wrong", [-1, 11, 10**9])
    def test_an_id_outside_of_the_vocabulary_is_an_error_after_the_step_and_changes_no_token(
        self, wrong: int, oracle: Any, make_ragged: Any, prompts: list[list[int]]
    ) -> None:
        sentence = rf"it drafted token id {wrong}, outside the target's vocabulary of 11"
        with pytest.raises(DraftError, match=sentence):
            build(oracle, make_ragged, OutOfVocabulary(wrong)).generate(prompts, 12)
        engine = build(oracle, make_ragged, OutOfVocabulary(wrong), on_drafter_error="disable")
        with pytest.warns(PluginWarning, match=sentence):
            outputs = engine.generate(prompts, 12)
        assert [output.token_ids for output in outputs] == [oracle.reference(prompt, 12) for prompt in prompts]
