"""``model.fallback=per_row``: models that mix tokens in unknown ways give the tokens of their own forward pass."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from emssd_ragged import RaggedConfig
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from emssd import Engine
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model import TargetModel, load_model, per_row
from emssd.sampling import SamplingParams
from emssd.testing.drafters import RandomDrafter, TreeDrafter
from emssd.testing.models import tiny_model
from emssd.testing.oracle import greedy_reference
from tests.support.trees import DecoyDrafter

VOCAB_SIZE, NEW_TOKENS = 13, 12
PROMPTS = ((3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4, 3, 3, 9), (8,), (9, 3, 11, 4, 9, 3, 12, 5, 9), (10, 6, 6, 7, 10, 6))
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
def references(kind: str) -> dict[tuple[int, ...], list[int]]:
    return {prompt: [*greedy_reference(model_of(kind), prompt, NEW_TOKENS + 1)] for prompt in PROMPTS}


def engine_of(kind: str, drafter: Any, **options: Any) -> Engine:
    options = {"batch_size": 3, "budget": "fixed", "max_model_len": 64, "on_drafter_error": "fail"} | options
    return Engine.from_model(model_of(kind), drafter=drafter, fallback="per_row", **options)


def check(kind: str, engine: Engine) -> None:
    done = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)
    expected = [tokens[:NEW_TOKENS] for tokens in references(kind).values()]
    assert [list(each.token_ids) for each in done] == expected


def summing() -> PreTrainedModel:
    """A model whose first layer mixes tokens beside its attention."""
    model = tiny_model("llama")
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden).cumsum(1)
    return model


@pytest.mark.costly("three runs of each kind")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_forward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = references(kind)
    monkeypatch.setattr(per_row, "_LONG", 12)  # texts outgrow what was learnt of them at load
    drafters = (
        RandomDrafter(VOCAB_SIZE, 5, known, seed=1),
        DecoyDrafter(VOCAB_SIZE, known),
        TreeDrafter(VOCAB_SIZE, 8, known, seed=2),
    )
    for drafter, backend in zip(drafters, ("ragged", "ragged", "padded"), strict=True):
        pieces = {} if backend == "padded" else {"max_step_tokens": 9}
        engine = engine_of(kind, drafter, backend=backend, **pieces)
        check(kind, engine)
        assert engine.report.num_accepted > NEW_TOKENS
        assert engine.report.kv_usage.held == 0


def test_rows_that_are_preempted_begin_again() -> None:
    model = summing()
    known = {prompt: [*greedy_reference(model, prompt, NEW_TOKENS + 1)] for prompt in PROMPTS}
    engine = Engine.from_model(
        model, drafter=DecoyDrafter(61, known, depth=1), budget="fixed", max_model_len=64, batch_size=3,
        kv_memory="118KiB", backend=RaggedConfig(page_size=4), fallback="per_row", on_drafter_error="fail",
    )  # fmt: skip
    engine.scheduler = ContinuousScheduler(3, headroom=0)
    done = engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)
    assert [list(each.token_ids) for each in done] == [tokens[:NEW_TOKENS] for tokens in known.values()]
    assert engine.report.num_preempted > 0


def test_whole_texts_count_as_memory() -> None:
    with pytest.raises(ConfigError, match=r"states of 3 rows, which take .* MiB, and KV"):
        engine_of("gptj", "none", kv_memory="20KiB")
    engine = engine_of("gptj", "none", kv_memory="10MiB")  # there is no KV to divide it among
    assert engine.target.bytes_per_row >= 2 * 64 * 32 * 8  # the inputs of two modules
    check("gptj", engine)
    assert engine.report.kv_usage.peak_held >= 3 * engine.target.bytes_per_row


def test_drafters_with_the_models_first_layers_keep_texts_of_their_own() -> None:
    model = summing()
    known = [[*greedy_reference(model, prompt, NEW_TOKENS)] for prompt in PROMPTS]
    engine = Engine.from_model(model, drafter="early_exit", fallback="per_row", on_drafter_error="fail")
    assert [list(each.token_ids) for each in engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)] == known
    assert engine.report.num_drafted > NEW_TOKENS


def test_sampled_texts_do_not_depend_on_drafts() -> None:
    texts = []
    for drafter in ("none", TreeDrafter(VOCAB_SIZE, 8, references("gptj"), seed=3)):
        sampling = SamplingParams(temperature=0.8, seed=5, n=2)
        done = engine_of("gptj", drafter).generate(PROMPTS[:2], NEW_TOKENS, sampling=sampling)
        texts.append([each.token_ids for each in done])
    assert texts[0] == texts[1]


def test_the_users_own_calls_are_as_before() -> None:
    model, ids = model_of("falcon"), torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        running = engine_of("falcon", "none").stream(PROMPTS, 4)
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
    known = {prompt: [*greedy_reference(model, prompt, NEW_TOKENS)] for prompt in PROMPTS}
    engine = Engine.from_model(model, drafter=DecoyDrafter(61, known), budget="fixed", fallback="per_row")
    assert [list(each.token_ids) for each in engine.generate(PROMPTS, NEW_TOKENS, ignore_eos=True)] == [*known.values()]


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
