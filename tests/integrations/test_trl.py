"""`Rollouts` gives the texts of the model as it is now; `test_trl_training.py` trains with TRL."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_suffix import SuffixConfig
from emssd_testing.models import tiny_model
from transformers import GenerationConfig, PreTrainedModel

import emssd
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError
from emssd.integrations import installed
from emssd.integrations.trl import Rollouts
from emssd.sampling import SamplingParams
from tests.cli.conftest import byte_tokenizer
from tests.support.sampling import sampled
from tests.support.tiers import looped

REMEMBERS = SuffixConfig(cache_tokens=10_000)
PROMPTS = ["the same words, the same words, the same", "hello hello", "12 12 12 12 12 12"]
NUM_NEW, NUM_SAMPLES = 16, 4


@pytest.fixture(autouse=True)
def some_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL is not needed for what needs no trainer."""
    monkeypatch.setattr(installed, "version", lambda _: "1.16.0")


def make_model(architecture: str = "opt", **overrides: Any) -> Any:
    """A model in float64, in training, that repeats itself."""
    vocab_size = len(byte_tokenizer())
    model = tiny_model(architecture, vocab_size=vocab_size, max_model_len=96, std=0.12, **overrides)
    model.generation_config.eos_token_id = byte_tokenizer().eos_token_id
    return model.train()


def stand_in(model: Any, **options: Any) -> Any:
    """The part of a trainer that `Rollouts` uses."""
    tokenizer = byte_tokenizer()
    config = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    config.update(**({"top_k": 0} | options))
    return SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped, device="cpu"),
        model_wrapped=model,
        processing_class=tokenizer,
        generation_config=config,
        use_vllm=False,
        use_transformers_continuous_batching=False,
        tools=None,
        _tokenize_prompts=lambda texts: (tokenizer(texts)["input_ids"], None, {}),
    )


def repeated(texts: list[str]) -> list[str]:
    """As `GRPOTrainer` hands them over: each as often as it is sampled."""
    return [text for text in texts for _ in range(NUM_SAMPLES)]


def plainly(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The text that Transformers generates from a prompt alone, without dropout."""
    model.eval()
    ids: torch.Tensor = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=byte_tokenizer().pad_token_id
    )
    model.train()
    return ids[0, len(prompt) :].tolist()


def step_in_place(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    ids = torch.arange(40).view(1, -1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("drafter", ["none", REMEMBERS])
def test_what_is_decoded_is_the_model_as_it_is_now(drafter: Any) -> None:
    """`test_ownership` tests other changes."""
    model = make_model()
    rollouts, trainer = Rollouts(drafter=drafter, budget=FixedBudget()), stand_in(model, do_sample=False)
    before = rollouts(PROMPTS, trainer)
    step_in_place(model)
    model.lm_head.eval()  # as a trainer may have it
    after = rollouts(PROMPTS, trainer)
    assert [name for name, each in model.named_modules() if not each.training] == ["lm_head"]
    assert after["completion_ids"] != before["completion_ids"]
    assert after["completion_ids"] == [plainly(model, ids) for ids in after["prompt_ids"]]


@pytest.mark.costly("compiles a model")
@pytest.mark.filterwarnings("error:the model runs without")
def test_a_compiled_rollout_copies_the_weights_as_they_are_now() -> None:
    model = make_model()
    model._original_forward, model.forward = model.forward, torch.autocast("cpu", torch.bfloat16)(model.forward)
    wrapped = model.forward  # as Accelerate leaves it
    rollouts, trainer = Rollouts(drafter=REMEMBERS, compile=True), stand_in(model, do_sample=False)
    before = rollouts(PROMPTS, trainer)
    step_in_place(model)
    after = rollouts(PROMPTS, trainer)
    assert model.forward is wrapped
    model.forward = model._original_forward
    del model._original_forward  # as it leaves it where there is no mixed precision
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that nothing is compiled
        assert rollouts(PROMPTS, trainer)["completion_ids"] == after["completion_ids"]
    del model.forward
    assert after["completion_ids"] != before["completion_ids"]
    assert after["completion_ids"] == [plainly(model, ids) for ids in after["prompt_ids"]]


def test_rows_are_samples_that_share_a_prompt_and_their_log_probabilities_are_those_of_what_was_drawn() -> None:
    model = make_model()
    rollouts, trainer = Rollouts(drafter=REMEMBERS), stand_in(model, temperature=0.7, top_k=5, repetition_penalty=1.2)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(3)
    found = rollouts(repeated(PROMPTS), trainer)
    assert rollouts.report is not None
    assert rollouts.report.num_adopted_tokens >= 32 * (NUM_SAMPLES - 1)
    params = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.2, seed=seed)
    model.eval()
    for row, (prompt, new, shares) in enumerate(zip(*found.values(), strict=True)):
        first, sample = row // NUM_SAMPLES * NUM_SAMPLES, row % NUM_SAMPLES
        eos = trainer.generation_config.eos_token_id
        assert tuple(new) == sampled(model, tuple(prompt), NUM_NEW, params, str(first), (eos,), sample)
        assert len(shares) == len(new)
        assert all(-5 < share <= 0 for share in shares)  # of five tokens each
    assert len({tuple(new) for new in found["completion_ids"]}) > len(PROMPTS)
    assert rollouts(repeated(PROMPTS), trainer) != found


def test_earlier_rollouts_are_drafted_from_if_the_drafter_remembers_texts() -> None:
    rollouts, trainer = Rollouts(drafter=REMEMBERS, budget=FixedBudget()), stand_in(make_model(), do_sample=False)
    counts = list[int]()
    for _ in range(2):
        rollouts(PROMPTS, trainer)
        assert rollouts.report is not None
        counts.append(rollouts.report.num_accepted)
    assert counts[1] > counts[0]


def test_a_drafter_on_the_targets_own_pages_drafts_from_the_rows_of_the_rollout() -> None:
    rollouts = Rollouts(drafter="self", budget=FixedBudget())
    for dtype in (torch.float64, torch.bfloat16):  # for the second, the engine is made again
        trainer = stand_in(make_model("llama").to(dtype), do_sample=False)
        rollouts(PROMPTS, trainer)
        assert rollouts.report is not None
        assert rollouts.report.num_accepted > 0


@looped(
    ("changes", "sentence"),
    [
        ({"use_vllm": True}, "leave out use_vllm"),
        ({"tools": [print]}, "generate of its own"),
        ({"is_fsdp_enabled": True}, "train without FSDP"),
        ({"_tokenize_prompts": lambda texts: ([[5] * 90], None, {})}, "up to 106 tokens, and this model takes 96"),
        ({"_tokenize_prompts": lambda texts: ([[1]], ["image"], {})}, "have images"),
        ({"generation_config": GenerationConfig(stop_strings=["a"])}, "cannot honour stop_strings"),
    ],
)
def test_trainers_that_cannot_be_served(changes: dict[str, Any], sentence: str) -> None:
    trainer = stand_in(make_model())
    vars(trainer).update(changes)
    with pytest.raises(ConfigError, match=sentence):
        Rollouts()(PROMPTS, trainer)


@pytest.mark.parametrize("kind", ["lora", "prompts"])
def test_adapters_decode_and_learned_prompts_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: nox -s trl")
    if kind == "prompts":
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with pytest.raises(ConfigError, match="does not see the learned prompts of PROMPT_TUNING"):
            Rollouts()(PROMPTS, stand_in(peft.get_peft_model(make_model(), config)))
        return
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.3)
    plain, model = make_model(), peft.get_peft_model(make_model(), config).train()
    trainer = stand_in(model, do_sample=False)
    prompts, completions, _ = Rollouts()(PROMPTS, trainer).values()
    assert completions == [plainly(model, ids) for ids in prompts] != [plainly(plain, ids) for ids in prompts]
    with emssd.speculate(model):
        outputs = model.generate_batch(prompts, trainer.generation_config)
    assert [output.generated_tokens for output in outputs.values()] == completions
