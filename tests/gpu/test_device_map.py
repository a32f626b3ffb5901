"""Layers on several devices, one of them a GPU: the tokens are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from emssd.decoding.engine import Engine
from emssd.testing.models import tiny_model
from emssd.testing.oracle import greedy_reference

pytest.importorskip("accelerate", reason="model.device_map needs accelerate: pip install 'emssd[devices]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run nox -s gpu on a machine with one"),
]

PROMPTS = [[1, 5, 6, 7, 5, 6, 7, 5, 6], [1, 9], [1, 4, 4, 4, 4, 4, 4, 4, 4], [1, 3, 8, 3, 8, 3]]
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
def test_tokens_equal_greedy_decoding_on_the_cpu(
    architecture: str, name: str, backend: str, drafter: str, tmp_path: Path
) -> None:
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
