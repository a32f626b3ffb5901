"""Tests of ``backend=flashinfer`` that need a GPU. Run by ``nox -s gpu``; results belong into docs/gpu.md."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_flashinfer import FlashInferConfig, unavailable
from emssd_flashinfer.kernels import FlashInferKernels
from emssd_llma import LLMAConfig
from emssd_testing import AttentionBackendConformance
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, TreeDrafter, WrongDrafter
from emssd_testing.machines import BackendMachine
from emssd_testing.models import tiny_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from emssd.attention import AttentionBackend, KVCacheSpec, LayerSpec, PagedBackend
from emssd.attention.pool import free_bytes
from emssd.decoding.caches import make_backend
from emssd.decoding.check import compare
from emssd.decoding.engine import Engine
from emssd.drafting import Drafter
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import FinishReason, Generation, Request, Row
from tests.support.reference_kernels import ReferenceKernels, tree_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(unavailable() is not None, reason=f"flashinfer: {unavailable()}")]

CUDA = torch.device("cuda", 0)
EAGER, RECORDED = FlashInferConfig(cuda_graphs=False), FlashInferConfig(max_graph_tokens=64)

# Outputs are averages of values in [-1.5, 1.5]. The kernels round weights and result to the dtype (relative 2^-11 and
# 2^-8), and their tanh under a soft-cap is good to 2^-11 of scores up to the cap: a few roundings of 1.5.
TOLERANCE = {torch.float16: 8e-3, torch.bfloat16: 4e-2}

# Each kind of layer has its own kernel to compile, so there are few: dtype, heads, key heads, dim, window, soft-cap.
LAYERS = {
    "opt-125m": (torch.float16, 12, 12, 64, None, None),
    "opt-2.7b": (torch.float16, 8, 8, 80, None, None),
    "opt-6.7b": (torch.float16, 8, 8, 128, None, None),
    "llama": (torch.bfloat16, 8, 2, 128, None, None),
    "group of 8": (torch.bfloat16, 8, 1, 128, None, None),
    "mistral": (torch.bfloat16, 8, 2, 128, 7, None),
    "gemma2": (torch.bfloat16, 8, 4, 256, 7, 30.0),
}

# Random models with the heads of real ones; `hidden_size` is heads times dimension where the architecture wants it.
MODELS: dict[str, dict[str, Any]] = {
    "opt-64": {"architecture": "opt", "hidden_size": 256, "word_embed_proj_dim": 256},
    "opt-80": {"architecture": "opt", "hidden_size": 320, "word_embed_proj_dim": 320},
    "opt-128": {"architecture": "opt", "hidden_size": 512, "word_embed_proj_dim": 512},
    "llama-128": {"architecture": "llama", "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen3-128": {"architecture": "qwen3", "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1},
}
ALL_DRAFTERS = ["none", "llma", "draft_model", "perfect", "wrong", "random", "tree"]
CASES = [
    *(("opt-128", torch.float16, drafter) for drafter in ALL_DRAFTERS),
    *(("llama-128", torch.bfloat16, drafter) for drafter in ALL_DRAFTERS),
    *((name, torch.float16, "random") for name in MODELS if name != "opt-128"),
    *((name, torch.bfloat16, "random") for name in MODELS if name not in {"opt-64", "llama-128"}),
]
PROMPTS = [[1, 5, 6, 7, 5, 6, 7, 5, 6], [1, 9], [1, *[4] * 40], [1, 3, 8, 3, 8, 3], [7]]


def make(config: FlashInferConfig) -> PagedBackend:
    backend: PagedBackend = Registry().find("backend", "flashinfer").build(config)
    return backend


@functools.cache
def target_of(name: str, dtype: torch.dtype) -> TargetModel:
    model = tiny_model(**MODELS[name], dtype=dtype, max_model_len=128, std=0.1).to(CUDA)
    model.generation_config.eos_token_id = None
    return TargetModel(model)


@functools.cache
def expected_of(name: str, dtype: torch.dtype) -> list[tuple[int, ...]]:
    """The tokens of Hugging Face, prompt by prompt."""
    return [hf_generate(target_of(name, dtype), prompt, 24) for prompt in PROMPTS]


def drafter_of(name: str, target: TargetModel, expected: list[tuple[int, ...]], config: Any) -> Drafter:
    references, vocabulary = {str(i): tokens for i, tokens in enumerate(expected)}, target.vocab_size
    match name:
        case "llma":
            drafter: Drafter = Registry().find("drafter", "llma").build(LLMAConfig(), None)
            return drafter
        case "draft_model":
            backend = make_backend(target.kv_cache_spec(3), config, Registry())
            return DraftModelDrafter(CausalLMRunner(target, backend), vocabulary, 4)
        case "perfect":
            return PerfectDrafter(vocabulary, 5, references)
        case "wrong":
            return WrongDrafter(vocabulary, 5, references)
        case "random":
            return RandomDrafter(vocabulary, 5, references, seed=3)
        case "tree":
            return TreeDrafter(vocabulary, 9, references, seed=3)
    return RandomDrafter(vocabulary, 0)


def engine_of(
    target: TargetModel, drafter: Drafter, config: Any = EAGER, batch_size: int = 3, **options: Any
) -> Engine:
    spec = replace(target.kv_cache_spec(batch_size), trees=drafter.drafts_trees)
    runner = CausalLMRunner(target, make_backend(spec, config, Registry()))
    return Engine(runner, drafter, batch_size=batch_size, **options)


def hf_generate(target: TargetModel, prompt: list[int], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt], device=CUDA)
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


def as_generations(outputs: list[tuple[int, ...]]) -> list[Generation]:
    return [
        Generation(str(i), tuple(prompt), tokens, None, FinishReason.LENGTH, 1, 0, 0)
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, outputs, strict=True))
    ]


@pytest.mark.parametrize("config", [EAGER, RECORDED], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_equals_the_dense_reference_after_any_history(name: str, config: FlashInferConfig) -> None:
    dtype, heads, kv_heads, dim, window, softcap = LAYERS[name]
    layer = LayerSpec(heads, kv_heads, dim, dim, dim**-0.5, window, softcap)

    class Machine(BackendMachine):
        layers = st.just((layer, layer))
        device = CUDA
        atol = TOLERANCE[dtype]

        def make_backend(self) -> AttentionBackend:
            return make(config)

    Machine.dtype = dtype
    run_state_machine_as_test(Machine, settings=settings(settings.default, max_examples=6, stateful_step_count=10))


@pytest.mark.parametrize("config", [EAGER, RECORDED], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", ["opt-6.7b", "mistral", "gemma2"])
def test_no_query_sees_what_is_not_its_own_and_steps_that_failed_never_happened(
    name: str, config: FlashInferConfig
) -> None:
    kind, heads, kv_heads, dim, window, cap = LAYERS[name]

    class Suite(AttentionBackendConformance):
        layers = st.just((LayerSpec(heads, kv_heads, dim, dim, dim**-0.5, window, cap),) * 2)
        dtype = kind
        device = CUDA
        atol = TOLERANCE[kind]
        num_examples = 6

        def make_backend(self) -> AttentionBackend:
            return make(config)

    Suite().test_no_query_sees_what_is_not_its_own()
    Suite().test_a_step_that_failed_never_happened()


@pytest.mark.parametrize("config", [EAGER, RECORDED], ids=["eager", "recorded"])
@pytest.mark.parametrize(("name", "dtype", "drafter"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_tokens_equal_hf_generate_or_differ_at_a_tie(
    name: str, dtype: torch.dtype, drafter: str, config: FlashInferConfig
) -> None:
    target, expected = target_of(name, dtype), expected_of(name, dtype)
    outputs = engine_of(target, drafter_of(drafter, target, expected, config), config).generate(
        PROMPTS, 24, ignore_eos=True
    )
    judge = make_backend(target.kv_cache_spec(1), "ragged", Registry())
    report = compare(outputs, as_generations(expected), CausalLMRunner(target, judge))
    assert not report.true_differences, report.true_differences


@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_attends_as_with_the_reference_kernels(window: int | None) -> None:
    # The window is part of the mask, so that no further kernel is compiled for it.
    layer = LayerSpec(8, 2, 128, 128, 128**-0.5, sliding_window=window)
    spec = KVCacheSpec((layer,), torch.bfloat16, CUDA, 2, 64)
    outs = [tree_attention(kernels, spec, 16) for kernels in (FlashInferKernels(), ReferenceKernels())]
    torch.testing.assert_close(*outs, rtol=0, atol=TOLERANCE[torch.bfloat16])


class TestHostWaits:
    """One copy to the host per step, and no other wait for the device; `ragged` looks at each forward pass as well."""

    @staticmethod
    def decoding(config: Any, drafter: str) -> Engine:
        """An engine whose prompts are computed and whose kernels and graphs are warm."""
        target = target_of("opt-128", torch.float16)
        engine = engine_of(target, drafter_of(drafter, target, [], config), config)
        engine.generate(PROMPTS[:3], 24, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS[:3]):
            engine.scheduler.add(Row(Request(str(i), tuple(prompt), 64)))
        for _ in range(3):
            engine.step()
        return engine

    @pytest.mark.parametrize("config", [EAGER, RECORDED, "ragged"], ids=["eager", "recorded", "ragged"])
    @pytest.mark.parametrize("drafter", ["none", "llma", "draft_model"])
    def test_a_step_waits_for_the_device_once(self, config: Any, drafter: str) -> None:
        engine = self.decoding(config, drafter)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # The first call in a process also warns about the mode itself; that is no wait.
        waits = [
            f"{warning.filename}:{warning.lineno}"
            for warning in caught
            if str(warning.message).startswith("called a synchronizing CUDA operation")
        ]
        looks = [wait for wait in waits if Path(wait.rpartition(":")[0]).name == "seen.py"]
        assert len(waits) - len(looks) == 1, waits
        num_passes = 1 + (4 if drafter == "draft_model" else 0)
        assert len(looks) <= (num_passes if config == "ragged" else 0), waits

    @pytest.mark.parametrize("config", [EAGER, RECORDED], ids=["eager", "recorded"])
    def test_the_profiler_sees_one_wait_too(self, config: Any) -> None:
        """Sees what FlashInfer's own code does as well, which PyTorch's debug mode does not."""
        engine = self.decoding(config, "none")
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            engine.step()
        waiting = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
        names = [event.name for event in profile.events() if event.name in waiting]
        assert len(names) == 1, names


def test_replayed_graphs_pad_and_say_so() -> None:
    target = target_of("opt-128", torch.float16)
    engine = engine_of(target, RandomDrafter(target.vocab_size, 5, seed=0), RECORDED)
    engine.generate(PROMPTS, 24, ignore_eos=True)
    assert 0 < engine.report.input_padding < engine.report.num_tokens


def test_without_a_limit_the_pool_leaves_memory_free() -> None:
    layer = LayerSpec(32, 32, 128, 128, 128**-0.5)
    spec = KVCacheSpec((layer,) * 32, torch.float16, CUDA, 128, 2**20)  # far more than any card has
    backend = make(FlashInferConfig(memory_fraction=0.1, cuda_graphs=False))
    free = free_bytes(CUDA)
    backend.allocate(spec)
    assert 0 < backend.kv_usage.peak_pool <= 0.11 * free


@pytest.mark.parametrize("name", ["opt-128", "llama-128", "qwen3-128"])
def test_a_model_is_compiled_for_recordings_and_differs_by_no_more_than_roundings(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # by which a model that is not compiled is told
        for drafter in ("random", "tree", "draft_model"):
            target = target_of(name, torch.float16)
            engine = engine_of(
                target, drafter_of(drafter, target, expected_of(name, torch.float16), RECORDED), RECORDED
            )
            engine.generate(PROMPTS, 24, ignore_eos=True)
    forwards: Any = engine.runner.backend
    assert [forward.has_failed for forward in forwards._kernels._compiled._forwards.values()] == [False]
