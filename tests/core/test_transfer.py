"""Drafts whose ids the host has not seen take another way through a step, to the same tokens and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from emssd.decoding.packing import pack
from emssd.decoding.verify import verify
from emssd.drafting import Draft, Drafter
from emssd.errors import DraftError
from emssd.plugins.registry import PluginWarning
from emssd.sequences import Batch, Request, Row
from emssd.testing.drafters import PerfectDrafter, RandomDrafter

CPU = torch.device("cpu")


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


def test_packing_gives_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(Request(str(i), tuple(range(3 + i)), 9)) for i in range(3)]
    draft = Draft.from_chains([[7, 8], [], [9]])
    seen = pack(rows, draft)
    monkeypatch.setattr(Draft, "on_host", property(lambda self: False))
    assert torch.equal(pack(rows, draft).on(CPU).input_ids, seen.input_ids)
    assert seen.input_ids.tolist() == [0, 1, 2, 7, 8, 0, 1, 2, 3, 0, 1, 2, 3, 4, 9]


def test_verification_brings_the_drafted_ids_to_the_host(unseen: None) -> None:
    first, second = verify(torch.tensor([7, 3, 1, 4]), Draft.from_chains([[7, 8], []]))
    assert (first.drafted, second.drafted) == ([7, 8], [])
    assert (first.new_tokens, second.new_tokens) == ([7, 3], [4])


def test_ids_are_forced_into_the_vocabulary_for_the_model_only(unseen: None) -> None:
    draft = Draft.from_chains([[-1, 4], [99]])
    assert draft.within(10).token_ids.tolist() == [0, 4, 9]
    assert draft.token_ids.tolist() == [-1, 4, 99]


def test_ids_on_the_host_stay_as_they_are() -> None:
    draft = Draft.from_chains([[1, 4], [9]])
    assert draft.within(10) is draft


@pytest.mark.usefixtures("unseen")
class TestEngine:
    def test_tokens_are_those_of_greedy_decoding(
        self, oracle: Any, build: Callable[..., Any], make_ragged: Any, prompts: list[list[int]]
    ) -> None:
        drafter = RandomDrafter(oracle.vocab_size, 4, oracle.references(prompts, 12), seed=0)
        outputs = build(oracle, make_ragged, drafter).generate(prompts, 12)
        assert [output.token_ids for output in outputs] == [oracle.reference(prompt, 12) for prompt in prompts]

    @pytest.mark.parametrize("wrong", [-1, 11, 10**9])
    def test_an_id_outside_of_the_vocabulary_is_an_error_after_the_step(
        self, wrong: int, oracle: Any, build: Callable[..., Any], make_ragged: Any, prompts: list[list[int]]
    ) -> None:
        engine = build(oracle, make_ragged, OutOfVocabulary(wrong))
        with pytest.raises(DraftError, match=rf"it drafted token id {wrong}, outside the target's vocabulary of 11"):
            engine.generate(prompts, 12)

    def test_of_several_drafters_the_one_that_drafted_it_is_named(
        self, oracle: Any, build: Callable[..., Any], make_ragged: Any, prompts: list[list[int]]
    ) -> None:
        first = PerfectDrafter(oracle.vocab_size, 3, {"0": oracle.reference(prompts[0], 12)})
        engine = build(oracle, make_ragged, [first, OutOfVocabulary(11)], on_drafter_error="disable")
        with pytest.warns(PluginWarning) as warned:
            outputs = engine.generate(prompts, 12)
        assert [str(warning.message).split()[1] for warning in warned] == ["OutOfVocabulary"]
        assert [output.token_ids for output in outputs] == [oracle.reference(prompt, 12) for prompt in prompts]

    @pytest.mark.parametrize("wrong", [-1, 11, 10**9])
    def test_a_drafter_that_is_switched_off_for_it_has_changed_no_token(
        self, wrong: int, oracle: Any, build: Callable[..., Any], make_ragged: Any, prompts: list[list[int]]
    ) -> None:
        engine = build(oracle, make_ragged, OutOfVocabulary(wrong), on_drafter_error="disable")
        with pytest.warns(PluginWarning, match="outside the target's vocabulary"):
            outputs = engine.generate(prompts, 12)
        assert [output.token_ids for output in outputs] == [oracle.reference(prompt, 12) for prompt in prompts]
