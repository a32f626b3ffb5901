"""Tests that need a GPU: the same tokens on CUDA. Run by ``nox -s gpu``; results belong into docs/gpu.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_padded import PaddedConfig
from emssd_testing.models import ARCHITECTURES, tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from emssd.sampling import SamplingParams
from emssd.sampling.noise import hashed, noise_key, noise_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run nox -s gpu on a machine with one"),
]

PROMPTS = [[1, 5, 6, 7, 5, 6, 7, 5, 6], [1, 9], [1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4], [1, 3, 8, 3, 8, 3]]
BACKENDS = {
    "ragged": "ragged",
    "padded": PaddedConfig(),
    "unpad_kv": PaddedConfig(pad_kv=False),
    "unpad_inputs": PaddedConfig(pad_inputs=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafter", ["none", "llma", "draft_model"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tokens_on_cuda_equal_greedy_decoding_on_the_cpu(architecture: str, drafter: str, backend: str) -> None:
    expected = [greedy_reference(tiny_model(architecture), prompt, 24, {2}) for prompt in PROMPTS]
    target = TargetModel(tiny_model(architecture).to("cuda"))
    registry = Registry()
    if drafter == "draft_model":
        twin = TargetModel(tiny_model(architecture).to("cuda"))
        chosen = DraftModelDrafter(
            CausalLMRunner(twin, make_backend(twin.kv_cache_spec(3), BACKENDS[backend], registry)), twin.vocab_size, 4
        )
    else:
        chosen = registry.find("drafter", drafter)
        chosen = chosen.build(chosen.config(), None)
    engine = Engine(
        CausalLMRunner(target, make_backend(target.kv_cache_spec(3), BACKENDS[backend], registry)),
        chosen,
        batch_size=3,
        eos_token_ids={2},
    )
    assert [list(generation.token_ids) for generation in engine.generate(PROMPTS, 24)] == expected


def test_noise_has_the_same_bits_on_cuda() -> None:
    states = [noise_state(noise_key(7, "é"), position) for position in (0, 5, 70_000)]
    here, there = (hashed(states, 32_000, torch.device(device)).cpu() for device in ("cpu", "cuda"))
    assert torch.equal(here, there)


@pytest.mark.parametrize("drafter", ["none", "llma"])
def test_sampled_tokens_on_cuda_are_those_on_the_cpu(drafter: str) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    texts = []
    for device in ("cpu", "cuda"):
        target = TargetModel(tiny_model("llama").to(device))
        engine = Engine.assemble(target, None, drafter=drafter if device == "cuda" else "none", backend="ragged")
        texts.append([done.token_ids for done in engine.generate(PROMPTS, 24, sampling=params)])
    assert texts[0] == texts[1]


ENDS = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
MAPS = {
    "cpu": ENDS | {"model.layers.1": "cpu", "model.norm": "cpu", "lm_head": "cpu"},
    "two GPUs": ENDS | {"model.layers.1": 1, "model.norm": 1, "lm_head": 1},
    "head on the first": ENDS | {"model.layers.1": 1, "model.norm": 1, "lm_head": 0},
}


@pytest.mark.parametrize("drafter", ["none", "llma", "lookahead"])
@pytest.mark.parametrize("backend", ["ragged", "padded"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_tokens_of_layers_on_several_devices_equal_greedy_decoding_on_the_cpu(
    architecture: str, name: str, backend: str, drafter: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="model.device_map needs accelerate: pip install 'emssd[devices]'")
    if name != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("this map needs two CUDA GPUs")
    from transformers import AutoModelForCausalLM

    tiny_model(architecture).save_pretrained(tmp_path)
    device_map: Any = MAPS[name]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, device_map=device_map)
    expected = [greedy_reference(tiny_model(architecture), prompt, 24, {2}) for prompt in PROMPTS]
    engine = Engine.from_model(model, drafter=drafter, backend=backend, batch_size=3)
    second = device_map["model.layers.1"]  # weights on the host are copied to the first GPU
    devices = [torch.device("cuda", number) for number in (0, 0 if second == "cpu" else second)]
    assert engine.target.device == torch.device("cuda", device_map["lm_head"] if name != "cpu" else 0)
    assert engine.target.devices == (() if {*devices} == {engine.target.device} else tuple(devices))
    assert [list(row.token_ids) for row in engine.generate(PROMPTS, 24)] == expected
