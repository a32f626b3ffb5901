"""The draft model's own cache never drifts from the sequences, and it never drafts what the target cannot take."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_draft_model import DraftModelConfig
from emssd_draft_model.build import build
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_ragged import Kernels, RaggedConfig
from emssd_testing.models import tiny_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from emssd import Engine
from emssd.data.demo import model_path
from emssd.decoding.caches import make_backend
from emssd.drafting import DrafterContext, Outcome
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import Batch, Request, Row
from tests.support.trees import chains_of

VOCAB_SIZE = 13
TOKENS = st.integers(3, VOCAB_SIZE - 1)


@cache
def draft_model(architecture: str = "llama", vocab_size: int = VOCAB_SIZE, max_model_len: int = 128) -> TargetModel:
    return TargetModel(tiny_model(architecture, seed=3, vocab_size=vocab_size, max_model_len=max_model_len))


def make_drafter(
    model: TargetModel, num_speculative_tokens: int = 4, backend: Any = "ragged", max_tokens: int | None = None
) -> DraftModelDrafter:
    if max_tokens is not None:
        backend = RaggedConfig(kernels=Kernels.torch)  # whose pages hold narrow heads without padding
    allocated = make_backend(replace(model.kv_cache_spec(4), max_tokens=max_tokens), backend, Registry())
    return DraftModelDrafter(CausalLMRunner(model, allocated), VOCAB_SIZE, num_speculative_tokens)


def runner_of(model: TargetModel) -> CausalLMRunner:
    return CausalLMRunner(model, make_backend(model.kv_cache_spec(4), "ragged", Registry()))


def make_context(model: TargetModel, tokenizer: Any = None, target_tokenizer: Any = None) -> DrafterContext:
    return DrafterContext(
        vocab_size=VOCAB_SIZE,
        tokenizer=target_tokenizer,
        load_runner=lambda path, **_: (runner_of(model), tokenizer),
        make_drafter=lambda name, options: pytest.fail("a draft model asks for no other drafter"),
    )


def make_tokenizer(num_words: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)})))


def sequence(tokens: list[int], name: str = "a") -> Row:
    return Row(Request(name, tuple(tokens), 100))


def greedy(model: TargetModel, tokens: list[int], count: int) -> list[int]:
    """Continue as the draft model itself does, without any cache."""
    text = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            logits = model.model(torch.tensor([text]), use_cache=False).logits[0, -1, :VOCAB_SIZE]
            text.append(int(logits.argmax()))
    return text[len(tokens) :]


# A first run of a model takes seconds, and explaining a failure minutes.
@settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))
@pytest.mark.parametrize("backend", ["ragged", "padded"])
@given(data=st.data())
def test_after_any_acceptance_it_drafts_what_a_fresh_drafter_drafts(backend: str, data: st.DataObject) -> None:
    model = draft_model()
    drafter = make_drafter(model, backend=backend)
    running: list[Row] = []
    admitted = 0
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        while not running or (len(running) < 4 and data.draw(st.booleans(), "admit")):
            running.append(sequence(data.draw(st.lists(TOKENS, min_size=1, max_size=9), "prompt"), str(admitted)))
            admitted += 1
        batch = Batch(tuple(running))
        budget = data.draw(st.lists(st.integers(0, 4), min_size=len(running), max_size=len(running)), "budget")
        with torch.inference_mode():
            draft = drafter.propose(batch, budget)
            fresh = make_drafter(model, backend=backend).propose(batch, budget)
        assert draft.lengths == budget
        assert chains_of(draft) == chains_of(fresh)
        accepted = tuple(range(data.draw(st.integers(0, length), "accepted")) for length in draft.lengths)
        for row, chain, taken in zip(running, chains_of(draft), accepted, strict=True):
            row.extend([*chain[: len(taken)], data.draw(TOKENS, "the target's own")])
        gone = [row for row in running if data.draw(st.booleans(), "finished")]
        with torch.inference_mode():
            drafter.observe(Outcome(batch, draft, accepted, ()))
            drafter.release([row.request_id for row in gone])
        running = [row for row in running if row not in gone]
    with torch.inference_mode():
        drafter.release([row.request_id for row in running])
    assert drafter._cache.held == {}
    assert drafter._runner.usage.held == 0


@pytest.mark.parametrize("architecture", ["opt", "llama", "mistral"])
def test_it_drafts_the_draft_models_own_greedy_continuation(architecture: str) -> None:
    model = draft_model(architecture)
    prompts = [[3, 4, 5, 6, 7, 3, 4, 5], [8], [9, 10, 9]]
    budget = [4, 2, 3]
    with torch.inference_mode():
        draft = make_drafter(model).propose(Batch(tuple(map(sequence, prompts, "abc"))), budget)
    assert chains_of(draft) == [greedy(model, prompt, count) for prompt, count in zip(prompts, budget, strict=True)]


def test_a_draft_model_shorter_than_the_target_drafts_nothing_beyond_its_length() -> None:
    target = tiny_model(seed=5, vocab_size=VOCAB_SIZE, max_model_len=64)
    short = draft_model("opt", max_model_len=16)
    prompts = [[3, 4, 5], list(range(3, 13)) + [3] * 20]
    expected = Engine.from_model(target, drafter="none").generate(prompts, 30, ignore_eos=True)
    done = Engine.from_model(target, drafter=make_drafter(short)).generate(prompts, 30, ignore_eos=True)
    assert [ours.token_ids for ours in done] == [theirs.token_ids for theirs in expected]
    assert done[0].num_drafted > 0
    assert done[1].num_drafted == 0
    with torch.inference_mode():
        drafts = [make_drafter(short).propose(Batch((sequence([3] * n),)), [4]).lengths for n in (11, 12, 14, 16, 17)]
    assert drafts == [[4], [4], [2], [0], [0]]


def test_ids_that_only_the_padded_vocabulary_of_the_draft_model_has_are_never_drafted() -> None:
    model = TargetModel(tiny_model("llama", vocab_size=VOCAB_SIZE + 5))
    with torch.no_grad():
        weight = model.model.lm_head.weight
        weight[VOCAB_SIZE:] = 50 * weight[:5]  # far ahead of all others wherever their sign is right
    prompts = [[3, 4, 5], [6, 7, 8], [9, 10]]
    batch = Batch(tuple(map(sequence, prompts, "abc")))
    with torch.inference_mode():
        unlimited = DraftModelDrafter(
            CausalLMRunner(model, make_backend(model.kv_cache_spec(4), "ragged", Registry())), VOCAB_SIZE + 5, 4
        ).propose(batch, [4, 4, 4])
        draft = make_drafter(model).propose(batch, [4, 4, 4])
    assert int(unlimited.token_ids.max()) >= VOCAB_SIZE  # it would like to
    assert chains_of(draft) == [greedy(model, prompt, 4) for prompt in prompts]
    assert int(draft.token_ids.max()) < VOCAB_SIZE


def test_after_ids_that_only_the_target_has_nothing_is_drafted() -> None:
    small = draft_model(vocab_size=VOCAB_SIZE - 3)
    rows = [sequence([3, VOCAB_SIZE - 3, 4], "a"), sequence([3, 4, 5], "b")]
    drafter = make_drafter(small)
    with torch.inference_mode():
        for _ in range(3):
            batch = Batch(tuple(rows))
            draft = drafter.propose(batch, [4, 4])
            assert draft.lengths == [0, 4]
            for row in rows:
                row.extend([5])
            drafter.observe(Outcome(batch, draft, (range(0), range(0)), ()))


@pytest.mark.parametrize(
    ("vocab_size", "tokenizers", "words"),
    [
        (13, (13, 12), "its tokenizer (13 tokens) is not the target's (12 tokens)"),
        (20, (), "its vocabulary has 20 tokens and the target's 13."),
    ],
)
def test_another_vocabulary_is_refused_by_the_tokenizers_or_its_size(
    vocab_size: int, tokenizers: Any, words: str
) -> None:
    context = make_context(draft_model(vocab_size=vocab_size), *map(make_tokenizer, tokenizers))
    with pytest.raises(ConfigError, match=f"draft model 'small-one' cannot draft .*{re.escape(words)}"):
        build(DraftModelConfig("small-one"), context)


def test_another_tokenizer_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """There are none to read."""
    make_tokenizer(12).save_pretrained(tmp_path)
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its tokenizer \(12 tokens\) is not the target's"):
        Engine.from_pretrained("demo", drafter=DraftModelConfig(str(tmp_path)))


@pytest.mark.parametrize("num_words", [0, 13])
def test_off_the_demo_it_asks_for_a_path(num_words: int) -> None:
    tokenizer = make_tokenizer(num_words) if num_words else None
    with pytest.raises(ConfigError, match=r"of the target's tokenizer: give drafter\.path=FOLDER"):
        build(DraftModelConfig(), make_context(draft_model(), target_tokenizer=tokenizer))


def test_the_target_itself_as_draft_model_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    for path in ("demo-draft", str(model_path("target"))):
        Engine.from_pretrained("demo", drafter=DraftModelConfig(path))
    assert [record.getMessage() for record in caplog.records if "draft" in record.getMessage()] == [
        f"draft model {path!r} is the target: it gains nothing; try drafter=self"
    ]


def test_with_the_same_tokenizer_a_vocabulary_padded_to_another_size_is_served() -> None:
    context = make_context(draft_model(vocab_size=20), make_tokenizer(13), make_tokenizer(13))
    drafter = build(DraftModelConfig("small-one", num_speculative_tokens=3), context)
    with torch.inference_mode():
        draft = drafter.propose(Batch((sequence([3, 4, 5]),)), [3])
    assert draft.lengths == [3]
    assert int(draft.token_ids.max()) < VOCAB_SIZE


def test_a_draft_model_that_is_not_there_is_told_with_its_path() -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        Engine.from_model(tiny_model(), drafter=DraftModelConfig("/nowhere"))
