"""Exactness against Hugging Face: `model.generate(do_sample=False)`, one unpadded row at a time, is the oracle.

float64: tokens are equal. float32: equal, or the first difference is a numerical tie as `check.compare` judges.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_ragged import Kernels, RaggedConfig
from emssd_testing.drafters import TreeDrafter
from emssd_testing.models import ARCHITECTURES, tiny_model
from emssd_testing.oracle import greedy_reference
from transformers import PreTrainedModel

from emssd import Engine, Generation
from emssd.decoding.check import compare
from emssd.model import TargetModel
from tests.support.backends import PADDED_CONFIGS
from tests.support.draft_models import same_weights_drafter
from tests.support.tiers import looped
from tests.support.trees import DecoyDrafter

from .conftest import LLMA, PROMPTS, VOCAB_SIZE
from .test_checkpoint import save_checkpoint

NEW_TOKENS = 24
BACKENDS: dict[str, Any] = {"ragged": "ragged", **PADDED_CONFIGS}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@cache
def model_of(architecture: str, dtype: str) -> PreTrainedModel:
    return tiny_model(architecture, dtype=DTYPES[dtype], vocab_size=VOCAB_SIZE, max_model_len=64)


@cache
def hugging_face(architecture: str, dtype: str) -> tuple[tuple[int, ...], ...]:
    return tuple(generate_row(model_of(architecture, dtype), prompt) for prompt in PROMPTS)


def generate_row(model: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # older Transformers let SDPA serve it, which drops the soft-cap
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
    return tuple(out[0, len(prompt) :].tolist())


def generate(model: PreTrainedModel, drafter: str, backend: Any) -> tuple[Engine, list[Generation]]:
    chosen: Any = {"llma": LLMA, "none": "none"}.get(drafter) or same_weights_drafter(TargetModel(model), backend)
    engine = Engine.from_model(model, drafter=chosen, backend=backend, budget="fixed", batch_size=len(PROMPTS))
    return engine, engine.generate(PROMPTS, NEW_TOKENS)


def assert_equal_to_hugging_face(architecture: str, dtype: str, engine: Engine, done: list[Generation]) -> None:
    expected = hugging_face(architecture, dtype)
    if dtype == "float64":
        assert [generation.token_ids for generation in done] == list(expected)
        return
    greedy = [dataclasses.replace(ours, token_ids=theirs) for ours, theirs in zip(done, expected, strict=True)]
    report = compare(done, greedy, engine.runner)
    assert report.true_differences == []
    assert report.num_exact + len(report.ties) == len(PROMPTS)


@EVERY_DTYPE
@EVERY_ARCHITECTURE
@looped("drafter", ["llma", "draft_model", "none"])
def test_every_architecture_and_drafter_equals_generate_of_hugging_face(
    architecture: str, dtype: str, drafter: str
) -> None:
    engine, done = generate(model_of(architecture, dtype), drafter, "ragged")
    assert_equal_to_hugging_face(architecture, dtype, engine, done)
    if drafter == "llma" and dtype == "float64":  # drafts are accepted in these comparisons, and others are rejected
        assert 0 < engine.report.num_accepted < engine.report.num_drafted
    if drafter == "draft_model" and dtype == "float64":
        assert engine.report.mean_acceptance_length > 3
        # Every step but a row's last gives 4 drafted tokens and a bonus; a limit or an EOS rejects nothing.
        for generation in done:
            assert generation.num_steps == -(-len(generation.token_ids) // 5)
            assert generation.num_accepted == generation.num_drafted


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("backend", [*BACKENDS, "ragged-torch"])
def test_trees_of_every_shape_equal_generate_of_hugging_face(architecture: str, backend: str) -> None:
    model = model_of(architecture, "float64")
    references = dict(zip(PROMPTS, hugging_face(architecture, "float64"), strict=True))
    chosen = RaggedConfig(kernels=Kernels.torch) if backend == "ragged-torch" else BACKENDS[backend]
    for drafter in (TreeDrafter(VOCAB_SIZE, 9, references, right=0.7), DecoyDrafter(VOCAB_SIZE, references)):
        engine = Engine.from_model(model, drafter=drafter, backend=chosen, budget="fixed", batch_size=len(PROMPTS))
        done = engine.generate(PROMPTS, NEW_TOKENS)
        assert_equal_to_hugging_face(architecture, "float64", engine, done)
        assert 0 < engine.report.num_accepted < engine.report.num_drafted


def test_the_probe_learns_windows_grouped_heads_scale_and_soft_cap() -> None:
    windows = {"mistral": [7, 7], "gemma2": [7, None]} | {name: [None, None] for name in ("qwen2", "llama", "opt")}
    layers = {name: TargetModel(model_of(name, "float64")).layers for name in windows}
    assert {name: [layer.sliding_window for layer in layers[name]] for name in windows} == windows
    llama, gemma2 = layers["llama"][0], layers["gemma2"][0]
    assert (llama.num_qo_heads, llama.num_kv_heads, llama.key_dim, llama.softcap) == (4, 2, 8, None)
    assert (gemma2.softcap, gemma2.scale) == (5.0, pytest.approx(8**-0.5))
    assert layers["opt"][0].scale == 1.0


def test_a_window_shorter_than_the_probe_is_served() -> None:
    model = tiny_model("mistral", sliding_window=2, vocab_size=VOCAB_SIZE, max_model_len=64)
    _, done = generate(model, "llma", "ragged")
    assert [generation.token_ids for generation in done] == [generate_row(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("architecture", ["opt", "llama"])
def test_a_saved_model_with_its_tokenizer_continues_texts_as_hugging_face_does(
    architecture: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, architecture, max_model_len=64)
    engine = Engine.from_pretrained(str(tmp_path), dtype="float64", device="cpu", batch_size=2)
    texts = ["w4 w5 w6 w7 w4 w8 w9 w4 w5 w6 w7", "w9 w0", "w2 w4 w9 w0 w8 w5"]
    done = engine.generate(texts, NEW_TOKENS)
    for text, generation in zip(texts, done, strict=True):
        prompt = tuple(int(word[1:]) for word in text.split())
        expected = generate_row(engine.target.model, prompt)
        assert generation.prompt_ids == prompt
        assert generation.token_ids == expected
        assert generation.text == " ".join(f"w{token}" for token in expected if token not in (1, 3))  # special ones


def test_a_saved_model_runs_in_the_precision_of_its_checkpoint_unless_told_otherwise(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    assert Engine.from_pretrained(str(tmp_path), device="cpu").target.dtype == torch.float32
    assert Engine.from_pretrained(str(tmp_path), device="cpu", dtype="bfloat16").target.dtype == torch.bfloat16


def test_a_layer_that_passes_no_keywords_on() -> None:
    """As those of Nemotron."""
    model: Any = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    original = attention.forward

    def without_keywords(hidden_states: Any, position_embeddings: Any, attention_mask: Any, **_: Any) -> Any:
        return original(hidden_states, position_embeddings, attention_mask)

    attention.forward = without_keywords
    engine = Engine.from_model(model, drafter="llma", batch_size=2)
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4], [9]]
    for prompt, done in zip(prompts, engine.generate(prompts, 16), strict=True):
        assert list(done.token_ids) == list(greedy_reference(model, prompt, 16, [2]))
