"""Beside a compiled target: hidden states of its program, and drafts of its first layers.

Oracle: the model itself, uncompiled; and `greedy_reference`, in float64.
"""

from __future__ import annotations

import pytest
import torch
from emssd_testing.drafters import RandomDrafter
from emssd_testing.oracle import greedy_reference
from filelock import FileLock

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.draft_models import ModelDrafter
from emssd.draft_models.shapes import DynamicShape
from emssd.hooks.registry import Registry
from emssd.model import BorrowedTarget, ModelOptions, TargetModel
from emssd.native import cache_dir
from tests.support.hidden import Listener, right_states

from .conftest import PROMPTS, VOCAB_SIZE, assert_close, attend_apart, opt


@pytest.fixture(scope="module")
def with_hidden(targets: dict[str, TargetModel]) -> TargetModel:
    """A model whose program gives hidden states, too."""
    target = TargetModel(opt(), ModelOptions(compile=True), frozen=True)
    with FileLock(cache_dir() / "hidden.lock"):
        target.prepare_hidden([1, -1, 0])
        target.compile()
    return target


@torch.inference_mode()
def test_hidden_states_are_those_of_the_model_for_any_number_of_tokens(with_hidden: TargetModel) -> None:
    target = with_hidden
    for num_rows, num_tokens in [(1, 1), (1, 9), (1, 24), (1, 50), (3, 7), (4, 1), (2, 33)]:
        ids = torch.randint(0, VOCAB_SIZE, (num_rows, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
        arguments = ids, torch.arange(num_tokens).expand(num_rows, -1).contiguous(), attend_apart(num_rows)
        got, right = (dict.fromkeys((-1, 0, 1), ids) for _ in range(2))
        assert target.compiled is not None
        logits = target.compiled(*arguments, torch.tensor([0]), hidden=got)
        assert_close(logits, target.run(*arguments, torch.tensor([0]), hidden=right))
        for index, states in right.items():
            assert_close(got[index], states)
            assert states.shape == (num_rows, num_tokens, 32)
        assert not torch.allclose(right[0], right[1], atol=0.1)
        assert not torch.allclose(right[1], right[-1], atol=0.1)


def test_the_program_gives_hidden_states_in_a_run(with_hidden: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_hidden, "run", lambda *arguments, **options: pytest.fail("the model itself runs"))
    listener = Listener(RandomDrafter(VOCAB_SIZE, 4), (-1, 0))
    options = EngineOptions(batch_size=2, max_step_tokens=8, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(with_hidden, None, drafter=listener, backend="ragged", options=options, eos=())
    engine.generate(PROMPTS, 12)
    assert len(listener.finished) == len(PROMPTS)
    for tokens, got in listener.finished.values():
        for mine, right in zip(got, right_states(opt(), tokens[:-1], (-1, 0)), strict=True):
            assert_close(mine, right)


def test_first_layers_run_as_they_are_beside_the_program(targets: dict[str, TargetModel]) -> None:
    """All of them, so that every draft is right."""
    target = targets["gemma2-float64"]
    program = target.compiled
    cache = make_backend(target.kv_cache_spec(len(PROMPTS)), "ragged", Registry())
    runner = BorrowedTarget(target).first_layers(len(target.layers), cache)
    runner.take_hidden((1,))
    drafter = ModelDrafter(runner, VOCAB_SIZE, DynamicShape(4, 4, 1))
    options = EngineOptions(batch_size=len(PROMPTS), on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(target, None, drafter=drafter, backend="ragged", budget="fixed", options=options, eos=())
    for generation, prompt in zip(engine.generate(PROMPTS, 12), PROMPTS, strict=True):
        assert list(generation.token_ids) == greedy_reference(target.model, prompt, 12)
    assert engine.report.num_accepted == engine.report.num_drafted > 0
    assert target.compiled is program
