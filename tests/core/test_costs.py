"""The costs of a step match a model counted by hand and a walk over all tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.model import TargetModel
from emssd.model.costs import Costs
from emssd.testing.models import tiny_model

COSTS = Costs(weight_bytes=1000, kv_bytes_per_token=8, matmul_parameters=500, attention_flops_per_kv_token=6)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 40))
def test_a_step_is_the_sum_over_its_tokens(rows: int, new: int, context: int) -> None:
    moved, flops = COSTS.of_step(rows, rows * new, rows * (context + new))
    assert moved == 1000 + 8 * rows * (context + new)
    seen = sum(context + new for _ in range(rows) for _ in range(new))
    assert flops == pytest.approx(rows * new * 2 * 500 + 6 * seen, rel=1e-12)


def test_weights_are_counted_once_and_tables_that_are_only_looked_up_are_not() -> None:
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48  # queries, keys, values, output; MLP
    matmul = 2 * layer + 61 * 32  # and the projection to the vocabulary
    costs = Costs.of(TargetModel(tiny_model("llama", dtype=torch.float32, tie_word_embeddings=False)))
    assert costs.matmul_parameters == matmul
    assert costs.weight_bytes == 4 * (matmul + 5 * 32)  # norms
    assert costs.kv_bytes_per_token == 2 * 2 * 16 * 4
    assert costs.attention_flops_per_kv_token == 2 * 4 * 2 * (8 + 8)
    tied = Costs.of(TargetModel(tiny_model("llama", dtype=torch.float32, tie_word_embeddings=True)))
    assert tied == costs


def test_of_a_mixture_of_experts_a_token_takes_its_own() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 61, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("mixtral", **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = 32 * (32 + 16 + 16 + 32) + 32 * 8 + 2 * 3 * 32 * 48  # attention, router, two of eight experts
    costs = Costs.of(TargetModel(model))
    assert costs.matmul_parameters == 2 * layer + 61 * 32
    assert costs.weight_bytes == 4 * (costs.matmul_parameters + 5 * 32)
