"""The parts of trained heads: rotary positions are those of Transformers, and configs say what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.decoding.caches import make_backend
from emssd.drafters import HeadLane
from emssd.drafters.heads.config import DecoderConfig
from emssd.drafters.heads.files import Checkpoint
from emssd.drafters.heads.head import Head
from emssd.drafters.heads.layers import Attend, Rotary
from emssd.drafters.heads.loading import HeadFiles
from emssd.drafters.heads.target import TargetSizes
from emssd.errors import OutOfMemoryError
from emssd.plugins.registry import Registry
from tests.support.heads import CPU
from tests.support.tiers import looped

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


@looped(
    "values",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1000.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 16},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {"head_dim": 12},
    ],
)
def test_rotary_angles_are_those_of_transformers(values: dict[str, Any]) -> None:
    positions = torch.tensor([[0, 1, 7, 100]])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **values))(torch.zeros(1), positions)
    config = DecoderConfig.read(SIZES | values, "x")
    with torch.device("meta"):
        rotary = Rotary(config)
    for is_, wanted in zip(rotary(positions, torch.float32), theirs, strict=True):
        torch.testing.assert_close(is_.squeeze(2), wanted, rtol=1e-6, atol=1e-6)


def test_windows_are_of_the_layers_that_slide() -> None:
    values = SIZES | {"num_hidden_layers": 3, "sliding_window": 7}
    assert DecoderConfig.read(values, "x").windows == (None, None, None)
    types = {"layer_types": ["full_attention", "sliding_attention"]}  # fewer than layers, as when copied from another
    assert DecoderConfig.read(values | types, "x").windows == (None, 7, None)


class Plain(Head):
    """Attention alone."""

    input_size = 16

    def __init__(self, max_len: int | None) -> None:
        super().__init__()
        self.max_len = max_len

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(1, 1, 16, 16, 0.25),)

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        rows = inputs.flatten(0, 1).unsqueeze(1)
        return attend(0, rows, rows, rows).view_as(inputs)


def test_the_cache_of_a_head_is_no_longer_than_it_can_be_used() -> None:
    dynamic = DecoderConfig.read(SIZES | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "x")
    assert (dynamic.max_len, DecoderConfig.read(SIZES, "x").max_len) == (2048, None)
    target = KVCacheSpec((), torch.float64, CPU, 2, 64, prefix_caching=True)
    assert Plain(None).kv_cache_spec(target) == KVCacheSpec(Plain(None).specs, torch.float64, CPU, 2, 64)
    assert Plain(8).kv_cache_spec(target).max_model_len == 8


def test_a_runner_says_what_fits() -> None:
    head = Plain(None)
    spec = head.kv_cache_spec(KVCacheSpec((), torch.float64, CPU, 2, 64, max_tokens=32, continuous=True))
    runner = HeadLane(head, make_backend(spec, "ragged", Registry()))
    assert runner.fits({"a": 16, "b": 16})
    assert not runner.fits({"a": 17, "b": 16})


def test_no_room_for_the_weights_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    checkpoint = Checkpoint("x", None, {}, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})  # type: ignore[arg-type]
    files = HeadFiles(checkpoint, TargetSizes(2, 2, 1), {"weight": "weight", "bias": "bias"})
    monkeypatch.setattr(torch.nn.Linear, "to", full)
    with pytest.raises(OutOfMemoryError, match="cpu has no room for the trained head 'x'"):
        files.filled(lambda: torch.nn.Linear(2, 2))
