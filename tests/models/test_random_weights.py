"""A shape that no model can have is told in one sentence, whatever its architecture's code makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emssd.errors import ConfigError
from emssd.model.random_weights import counted_on, counting_model
from tests.support.tiers import looped

SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 61,
}  # fmt: skip


@looped(
    ("values", "said"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"vocab_size": 0}, "vocab_size is 0 or less"),
        ({"vocab_size": -1}, "vocab_size is 0 or less"),
        ({"intermediate_size": -1}, "RuntimeError: .*negative dimension"),
        ({"pad_token_id": 99}, "AssertionError: Padding_idx"),
        ({"dtype": "float3"}, "AttributeError: .*float3"),
        ({"hidden_act": "swish9"}, "KeyError: 'swish9'"),
        ({"eos_token_id": [[1]]}, "'eos_token_id' with value"),
        ({"model_type": 3}, "Unrecognized model identifier: 3"),
        ({"model_type": "vit"}, "Unrecognized configuration class|has no value"),
    ],
)
def test_a_shape_that_makes_no_model(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        counting_model(SHAPE | values, torch.float32, torch.device("cpu"))
    assert len(str(refusal.value)) < 500


def test_a_shape_without_a_type_makes_no_model() -> None:
    with pytest.raises(ConfigError, match="has no model_type"):
        counting_model({}, torch.float32, torch.device("cpu"))


def test_a_shape_that_does_counts() -> None:
    model = counting_model(SHAPE, torch.float32, torch.device("cpu"))
    ids = model.generate(torch.tensor([[58]]), do_sample=False, max_new_tokens=4)
    assert ids[0, 1:].tolist() == counted_on(58, 4, 61)
