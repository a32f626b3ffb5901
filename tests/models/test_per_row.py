"""``model.fallback=per_row``: models that mix tokens in unknown ways give the tokens of their own forward pass."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from emssd import Engine
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model import TargetModel, load_model, per_row
from emssd.sampling import SamplingParams
from emssd.testing.drafters import TreeDrafter
from emssd.testing.models import tiny_model
from tests.support.texts import NEW_TOKENS, PROMPTS, VOCAB_SIZE, Texts

IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": VOCAB_SIZE}
KINDS: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64},
}
"""A rotary one, one whose masks hold more than what is hidden, and one without attention."""


@cache
def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind], **IDS)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.ndim > 1 and "time" not in name:
                each.normal_(0.0, 0.3)
    return model


@cache
def texts_of(kind: str) -> Texts:
    return Texts(model_of(kind), fallback="per_row")


def summing() -> PreTrainedModel:
    """A model whose first layer mixes tokens beside its attention."""
    model = tiny_model("llama", vocab_size=VOCAB_SIZE)
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden).cumsum(1)
    return model


@pytest.mark.costly("three runs of each kind")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_forward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_row, "_LONG", 12)  # texts outgrow what was learnt of them at load
    texts_of(kind).try_every_draft()


def test_rows_that_are_preempted_begin_again() -> None:
    Texts(summing(), fallback="per_row").try_preemption("118KiB")


def test_whole_texts_count_as_memory() -> None:
    texts = texts_of("gptj")
    with pytest.raises(ConfigError, match=r"states of 3 rows, which take .* MiB, and KV"):
        texts.engine("none", kv_memory="20KiB")
    engine = texts.decoded(texts.engine("none", kv_memory="10MiB"))  # there is no KV to divide it among
    assert engine.target.bytes_per_row >= 2 * 64 * 32 * 8  # the inputs of two modules
    assert engine.report.kv_usage.peak_held >= 3 * engine.target.bytes_per_row


def test_drafters_with_the_models_first_layers_keep_texts_of_their_own() -> None:
    texts = Texts(summing(), fallback="per_row")
    assert texts.decoded(texts.engine("early_exit")).report.num_drafted > NEW_TOKENS


def test_sampled_texts_do_not_depend_on_drafts() -> None:
    texts, found = texts_of("gptj"), []
    for drafter in ("none", TreeDrafter(VOCAB_SIZE, 8, texts.known, seed=3)):
        sampling = SamplingParams(temperature=0.8, seed=5, n=2)
        done = texts.engine(drafter).generate(PROMPTS[:2], NEW_TOKENS, sampling=sampling)
        found.append([each.token_ids for each in done])
    assert found[0] == found[1]


def test_the_users_own_calls_are_as_before() -> None:
    model, ids = model_of("falcon"), torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        running = texts_of("falcon").engine("none").stream(PROMPTS, 4)
        next(running)
        assert torch.equal(model(ids, use_cache=False).logits, before)
        running.close()  # type: ignore[attr-defined]  # a generator


def test_it_says_what_runs_slowly_and_leaves_other_models_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "emssd"):
        target = TargetModel(tiny_model("llama"), fallback="per_row")
    assert not caplog.records
    assert not target.keeps_states
    with caplog.at_level(logging.WARNING, "emssd"):
        assert TargetModel(model_of("gptj"), max_model_len=64, fallback="per_row").keeps_states
    assert "2 modules of GPTJForCausalLM (transformer.h.0.attn, …) run row by row" in caplog.text


def test_a_refusal_names_the_option_or_the_module() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"interface.*model\.fallback=per_row runs what emssd does not know"
    ):
        Engine.from_model(model_of("gptj"), drafter="none")
    model = summing()
    with pytest.raises(UnsupportedModelError, match=r"gives other logits.*: model\.layers\.0\.mlp mixes tokens"):
        Engine.from_model(model, drafter="none")


def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    model = summing()
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: (
        own(hidden) + hidden.mean(1, keepdim=True) * (hidden.shape[1] > 30)
    )
    with pytest.raises(UnsupportedModelError, match="gives a token other logits when further tokens follow it"):
        Engine.from_model(model, drafter="none", fallback="per_row")


def test_a_model_that_pads_long_texts_is_refused_where_they_may_come() -> None:
    sizes = {"hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4, "feed_forward_size": 32}
    layers = {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "is_decoder": True,
        "lsh_attn_chunk_length": 48,
    }
    config = AutoConfig.for_model(
        "reformer", **sizes, **layers, local_attn_chunk_length=48, **IDS | {"pad_token_id": 0}
    )
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config).eval()
    Engine.from_model(model, drafter="none", fallback="per_row", max_model_len=48)
    Engine.from_model(model, drafter="none", fallback="per_row", max_model_len=20)
    with pytest.raises(UnsupportedModelError, match=r"gets other numbers of tokens than a text of 63 has"):
        Engine.from_model(model, drafter="none", fallback="per_row", max_model_len=64)


def test_one_device_and_known_names_only() -> None:
    with pytest.raises(ConfigError, match=r"model\.fallback is slow; it must be none or per_row"):
        TargetModel(model_of("gptj"), fallback="slow")
    with pytest.raises(ConfigError, match=r"leave it or model\.fallback=per_row out"):
        Engine.from_pretrained("demo", device_map="auto", fallback="per_row")
    with pytest.raises(ConfigError, match=r"leave it or model\.tensor_parallel out"):
        load_model("demo", tensor_parallel=True, fallback="per_row")
