"""The draft model's own cache never drifts from the sequences, and it never drafts what the target cannot take."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_draft_model import DraftModelConfig
from emssd_draft_model.build import build
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import next_logits
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from emssd import Engine
from emssd.data.demo import model_path
from emssd.decoding.caches import make_backend
from emssd.drafting import DrafterContext, Outcome
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import Batch
from tests.support.trees import chains_of, sequence

VOCAB_SIZE = 13


@cache
def draft_model(vocab_size: int = VOCAB_SIZE) -> TargetModel:
    return TargetModel(tiny_model("llama", seed=3, vocab_size=vocab_size, max_model_len=128))


def runner_of(model: TargetModel) -> CausalLMRunner:
    return CausalLMRunner(model, make_backend(model.kv_cache_spec(4), "ragged", Registry()))


def make_drafter(model: TargetModel) -> DraftModelDrafter:
    return DraftModelDrafter(runner_of(model), VOCAB_SIZE, 4)


def make_context(model: TargetModel, tokenizer: Any = None, target_tokenizer: Any = None) -> DrafterContext:
    return DrafterContext(
        vocab_size=VOCAB_SIZE,
        tokenizer=target_tokenizer,
        load_runner=lambda path, **_: (runner_of(model), tokenizer),
        make_drafter=lambda name, options: pytest.fail("a draft model asks for no other drafter"),
    )


def make_tokenizer(num_words: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)})))


@pytest.mark.parametrize("architecture", ["opt", "llama", "mistral"])
def test_it_drafts_the_draft_models_own_greedy_continuation_with_ids_that_the_target_has(architecture: str) -> None:
    model = TargetModel(tiny_model(architecture, vocab_size=VOCAB_SIZE + 5))
    with torch.no_grad():
        weight = model.model.lm_head.weight
        weight[VOCAB_SIZE:] = 50 * weight[:5]  # far ahead of all others wherever their sign is right
    prompts, budget = [[3, 4, 5, 6, 7, 3, 4, 5], [8], [9, 10, 9]], [4, 2, 3]
    batch = Batch(tuple(map(sequence, prompts, "abc")))
    with torch.inference_mode():
        unlimited = DraftModelDrafter(runner_of(model), VOCAB_SIZE + 5, 4).propose(batch, budget)
        draft = make_drafter(model).propose(batch, budget)
    assert int(unlimited.token_ids.max()) >= VOCAB_SIZE  # it would like to
    for prompt, chain, count in zip(prompts, chains_of(draft), budget, strict=True):
        assert len(chain) == count
        for at, token in enumerate(chain):
            assert token == int(next_logits(model.model, [*prompt, *chain[:at]])[:VOCAB_SIZE].argmax())


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
