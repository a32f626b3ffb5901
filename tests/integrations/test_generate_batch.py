"""`emssd.speculate`: `model.generate_batch` and its manager give the tokens of `model.generate`; nox -s newest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from emssd_testing.models import WideFloats, tiny_model
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

import emssd
from emssd import SamplingParams
from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError, PluginError, UnsupportedModelError
from emssd.integrations.continuous_batching import SpeculativeManager, SpeculativeOutput
from emssd.model.compile.fingerprint import refuse_hooks
from tests.cli.conftest import byte_tokenizer
from tests.support.sampling import probabilities, sampled, scores
from tests.support.tiers import looped

PROMPTS = [[3, 4, 5] * 2, [8], [9, 10, 9], [4, 4, 4, 12, 4, 4], [5, 6] * 6, [7], [3, 4], [11] * 9, [6, 12], [10]]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "gpt_neox", "phi", "opt", "mamba2"]
NUM_NEW = 8


def make_model(architecture: str = "llama", **options: Any) -> PreTrainedModel:
    return tiny_model(architecture, vocab_size=13, max_model_len=64, **options)


def config_of(**options: Any) -> GenerationConfig:
    return GenerationConfig(**({"max_new_tokens": NUM_NEW, "eos_token_id": 2, "pad_token_id": 0} | options))


def plainly(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    """The new tokens of a prompt by Transformers alone."""
    ids: torch.Tensor = model.generate(torch.tensor([prompt]), config_of(do_sample=False, **options))
    return ids[0, len(prompt) :].tolist()


@contextmanager
def managing(model: PreTrainedModel, config: GenerationConfig | None = None, **options: Any) -> Iterator[Any]:
    """A manager that is not yet running."""
    with emssd.speculate(model, **options):
        manager = model.init_continuous_batching(generation_config=config or config_of())
        try:
            yield manager
        finally:
            manager.stop()


def results(manager: SpeculativeManager, number: int) -> dict[str, SpeculativeOutput]:
    """The last outputs of so many requests, by name; of two that have one name, the later."""
    done: list[SpeculativeOutput] = []
    while len(done) < number:
        output = manager.get_result(timeout=10)
        assert isinstance(output, SpeculativeOutput), f"nothing came after {done}"
        done += [output] if output.is_finished() else []
    return {output.request_id: output for output in done}


class Acting(Drafter):
    """Drafts nothing, and calls `act` with the number of the step."""

    num_speculative_tokens = 1  # so that it is asked

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act, self.step = act, 0

    def propose(self, batch: Any, limits: Any) -> Draft:
        self.step += 1
        self.act(self.step)
        return Draft.empty(len(batch))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tokens_are_those_of_generate(architecture: str) -> None:
    model = make_model(architecture)
    with WideFloats():
        expected = [plainly(model, prompt) for prompt in PROMPTS]
        with emssd.speculate(model, max_model_len=64):
            for rows in (1, 5, 33):
                config = config_of(min_new_tokens=0, return_dict_in_generate=True)  # which change nothing here
                outputs = model.generate_batch((PROMPTS * 4)[:rows], generation_config=config)
                assert [output.generated_tokens for output in outputs.values()] == (expected * 4)[:rows]
                assert [*outputs] == [f"req_{number}" for number in range(rows)]


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_samples_follow_the_seed_whatever_drafts_in_any_batch(drafter: str) -> None:
    model = make_model()
    config = config_of(do_sample=True, temperature=0.8, top_k=7, repetition_penalty=1.1, num_return_sequences=3)
    batching = ContinuousBatchingConfig(seed=5, return_logprobs=True)
    params = SamplingParams(temperature=0.8, top_k=7, repetition_penalty=1.1, seed=5)
    with emssd.speculate(model, drafter=drafter, batch_size=4):
        outputs = model.generate_batch(PROMPTS, config, batching, record_timestamps=True)
    assert [*outputs][:4] == ["req_0__child#0", "req_0__child#1", "req_0", "req_1__child#0"]
    for row, output in enumerate(outputs.values()):
        prompt = output.prompt_ids
        assert prompt == PROMPTS[row // 3]
        assert tuple(output.generated_tokens) == sampled(model, prompt, NUM_NEW, params, str(row // 3), (2,), row % 3)
        assert len(output.logprobs) == len(output.timestamps) == len(output.generated_tokens)
        logits = model(torch.tensor([prompt])).logits[0, -1].tolist()
        share = probabilities(scores(logits, params, prompt, len(prompt)))[output.generated_tokens[0]]
        assert math.isclose(output.logprobs[0], math.log(share), rel_tol=1e-9)


def test_a_request_has_options_of_its_own_and_fails_alone() -> None:
    model, tokenizer = tiny_model(vocab_size=len(byte_tokenizer()), std=0.12), byte_tokenizer()
    prompt = tokenizer("the same, the same, the")["input_ids"]
    own = SamplingParams(temperature=0.9, seed=8, n=2, logprobs=1)
    with managing(model, tokenizer=tokenizer) as manager:
        names = {
            "long": manager.add_request(prompt, max_new_tokens=12, eos_token_id=-1),
            "drawn": manager.add_request(prompt, sampling=own),
            "form": manager.add_request(prompt, sampling=SamplingParams(grammar="regex:ab[bc]{3}"), stop=["b"]),
            "cold": manager.add_request(prompt, temperature=0.4, top_k=2),
            "odd": manager.add_request(prompt, top_n=3),
            "empty": manager.add_request([]),
            "far": manager.add_request([10**6]),
        }
        manager.add_request(prompt, request_id=names["long"])  # fails, as there is one
        manager.start()
        outputs = results(manager, 9)
    assert outputs[names["long"]].generated_tokens == plainly(model, prompt, max_new_tokens=12, eos_token_id=None)
    assert outputs[names["form"]].generation.text == "a"
    drawn = emssd.Engine.from_model(model, tokenizer).generate([prompt], NUM_NEW, sampling=own)
    found = [outputs[name].generation for name in (f"{names['drawn']}__child#0", names["drawn"])]
    assert [row.token_ids for row in found] == [row.token_ids for row in drawn]
    for row, like in zip(found, drawn, strict=True):
        assert [token.logprob for token in row.logprobs] == pytest.approx([token.logprob for token in like.logprobs])
    params = SamplingParams(temperature=0.4, top_k=2)
    number = names["cold"].removeprefix("req_")
    assert tuple(outputs[names["cold"]].generated_tokens) == sampled(model, prompt, NUM_NEW, params, number, (2,))
    sentences = {name: outputs[names[name]].error for name in ("odd", "empty", "far")}
    assert "unknown option 'top_n' of a request; it takes sampling, stop" in sentences["odd"]
    assert "is empty" in sentences["empty"]
    assert "outside the model's vocabulary" in sentences["far"]


def test_all_samples_of_a_request_that_cannot_be_decoded_fail() -> None:
    model = make_model()
    with emssd.speculate(model):
        outputs = model.generate_batch([[], PROMPTS[0]], config_of(do_sample=True, num_return_sequences=2))
    assert ["is empty" in str(output.error) for output in outputs.values()] == [True, True, False, False]


def test_requests_come_and_go_while_others_run() -> None:
    model = make_model()

    def act(step: int) -> None:
        if step == 3:
            manager.cancel_request("gone")
            manager.add_request(PROMPTS[2], max_new_tokens=4, request_id="late", streaming=True, eos_token_id=-1)

    with managing(model, drafter=Acting(act), budget="fixed") as manager:
        manager.add_request(PROMPTS[0], max_new_tokens=20, eos_token_id=-1)
        manager.add_request(PROMPTS[1], max_new_tokens=20, request_id="gone", sampling=SamplingParams(n=2))
        manager.start()
        steps = [output.generated_tokens for output in manager.request_id_iter("late")]
        outputs = results(manager, 1)
        assert manager.get_result(timeout=0.1) is None
    expected = plainly(model, PROMPTS[2], max_new_tokens=4, eos_token_id=None)
    assert steps == [expected[:count] for count in range(1, 5)]
    assert outputs["req_0"].generated_tokens == plainly(model, PROMPTS[0], max_new_tokens=20, eos_token_id=None)


def test_a_handler_gets_the_outputs_in_its_loop() -> None:
    model = make_model()

    async def read(manager: SpeculativeManager) -> list[list[int]]:
        outputs: asyncio.Queue[SpeculativeOutput] = asyncio.Queue()
        manager.register_result_handler("a", outputs.put_nowait)
        manager.add_request(PROMPTS[0], request_id="a", streaming=True)
        seen = [await outputs.get()]
        while not seen[-1].is_finished():
            seen.append(await outputs.get())
        return [output.generated_tokens for output in seen]

    with managing(model) as manager:
        manager.start()
        seen = asyncio.run(read(manager))
    assert seen[-1] == plainly(model, PROMPTS[0])
    assert all(later[: len(sooner)] == sooner for sooner, later in pairwise(seen))


@pytest.mark.filterwarnings("ignore::emssd.errors.PluginWarning")
def test_an_engine_that_dies_says_so_and_the_next_manager_finds_it_idle() -> None:
    model = make_model()

    def act(step: int) -> None:
        if step == 4:
            raise RuntimeError("the disk is full")

    drafter = Acting(act)
    with emssd.speculate(model, drafter=drafter, budget="fixed", on_drafter_error="fail"):
        manager = model.init_continuous_batching(generation_config=config_of())
        short = manager.add_request(PROMPTS[1], max_new_tokens=2, eos_token_id=-1)
        long = manager.add_request(PROMPTS[0], max_new_tokens=20, eos_token_id=-1)
        manager.start()
        outputs = results(manager, 2)
        manager.join(0.0)
        assert isinstance(manager.background_thread_status.fatal_error, PluginError)
        assert manager.add_request(PROMPTS[0]) is None
        assert outputs[short].error is None
        assert "the disk is full" in str(outputs[long].error)
        (output,) = model.generate_batch(PROMPTS[:1], generation_config=config_of()).values()
        assert output.generated_tokens == plainly(model, PROMPTS[0])


def change(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.0)


def test_the_model_may_change_between_runs_and_within_a_pause() -> None:
    model = make_model(attention_dropout=0.1).train()
    with managing(model, config_of(eos_token_id=None)) as manager:
        for restart in (False, True):
            before = plainly(model.eval(), PROMPTS[0], eos_token_id=None)
            model.train()
            manager.start()
            assert results_of(manager, PROMPTS[0]) == before
            with manager.pause():
                change(model)
            after = results_of(manager, PROMPTS[0])
            manager.stop(keep_for_next_session=True)
            assert model.training
            model.eval()
            assert before != after == plainly(model, PROMPTS[0], eos_token_id=None)
            if not restart:
                change(model.train())
        assert model.init_continuous_batching() is manager


def results_of(manager: SpeculativeManager, prompt: list[int]) -> list[int]:
    name = manager.add_request(prompt)
    tokens: list[int] = results(manager, 1)[str(name)].generated_tokens
    return tokens


def test_a_model_is_given_back_as_it_was() -> None:
    model = make_model().train()
    before = dict(vars(model)), model.config._attn_implementation
    with emssd.speculate(model):
        refuse_hooks(model)  # so that it can be compiled
        model.generate_batch(PROMPTS, generation_config=config_of(), persistent_manager=True)
        running = model.init_continuous_batching()
        running.start()
        assert running.is_running()
    assert not running.is_running()
    assert (dict(vars(model)), model.config._attn_implementation) == before
    assert all(module.training for module in model.modules())
    emssd.speculate(model).close()
    assert dict(vars(model)) == before[0]


@looped(
    ("config", "options", "error", "sentence"),
    [
        ({"num_beams": 2}, {}, ConfigError, "cannot honour num_beams=2"),
        ({"min_new_tokens": 3}, {}, ConfigError, "cannot honour min_new_tokens=3"),
        ({"max_time": 2.0}, {}, ConfigError, "cannot honour max_time=2.0"),
        ({"do_sample": True, "temperature": -1.0}, {}, ConfigError, "temperature is -1.0"),
        ({}, {"drafter": "sufix"}, PluginError, "did you mean 'suffix'"),
        ({}, {"batch": 3}, ConfigError, "unknown option 'batch'.* takes batch_size"),
        ({}, {"max_model_len": 10**6}, ConfigError, "max_model_len is 1000000"),
    ],
)
def test_what_cannot_be_honoured(
    config: dict[str, Any], options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    model = make_model()
    with pytest.raises(error, match=sentence), emssd.speculate(model, **options):
        model.generate_batch(PROMPTS, generation_config=config_of(**config))
    assert "init_continuous_batching" not in vars(model)


def test_one_engine_and_one_manager_at_a_time() -> None:
    model = make_model()
    with managing(model) as manager:
        manager.start()
        with pytest.raises(ConfigError, match="close that one first"):
            emssd.speculate(model)
        with pytest.raises(ConfigError, match="for another manager; stop that one"):
            model.generate_batch(PROMPTS, generation_config=config_of())
        results_of(manager, PROMPTS[0])
        change(model)
        manager.add_request(PROMPTS[0])
        results(manager, 1)
        assert isinstance(manager.background_thread_status.fatal_error, UnsupportedModelError)
