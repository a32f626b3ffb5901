"""Prompts, a drafter and tiny models; those that several of these files compile, so that it is done once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_llma import LLMAConfig, Search
from emssd_testing.models import tiny_model
from filelock import FileLock
from transformers import PreTrainedModel

from emssd.attention import LayerSpec, additive_mask, masked_attention
from emssd.model import ModelOptions, TargetModel
from emssd.native import cache_dir

VOCAB_SIZE = 13  # few tokens: continuations repeat themselves, so that retrieval is accepted
PROMPTS = (  # ragged; all but the second are longer than the sliding windows of 7, and the first repeats itself
    (3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4),
    (8,),
    (9, 3, 11, 4, 9, 3, 12, 5, 9, 3),
    (10, 6, 6, 7, 10, 6, 6, 8, 10, 5, 4, 10, 6),
)
# Looks everywhere after a single token, so that its drafts are often there, often wrong, and of every length.
LLMA = LLMAConfig(match_length=1, copy_length=4, search=Search.prompt_and_output, require_full_copy=False)
# Rounding of other orders of the same sums. Gemma takes norms in float32, whatever the model.
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-5}


def opt(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With biases, and with embeddings that are those of its output layer."""
    return tiny_model("opt", dtype=dtype, num_hidden_layers=1, vocab_size=VOCAB_SIZE, max_model_len=64, seed=seed)


def gemma2() -> PreTrainedModel:
    """With grouped heads, a window in one layer and a soft-cap; no kernel is for linear layers of its type."""
    return tiny_model("gemma2", dtype=torch.float64, vocab_size=VOCAB_SIZE, max_model_len=64)


MODELS = {"opt-float32": opt, "gemma2-float64": gemma2}


def assert_close(got: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(got, right, atol=CLOSE[right.dtype], rtol=CLOSE[right.dtype])


@pytest.fixture(scope="session")
def kept_program(kernels: None) -> Path:
    """The program of `opt` on disk."""
    with FileLock(cache_dir() / "opt-float32.lock"):
        program = TargetModel(opt(), ModelOptions(compile=True)).compiled
    assert program is not None
    return program.folder


@pytest.fixture(scope="session")
def targets(kernels: None) -> dict[str, TargetModel]:
    """Each is compiled by one of the test processes, of which every other begins with the last."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    made = {}
    for name in sorted(MODELS, reverse=int(worker) % 2 == 1):
        with FileLock(cache_dir() / f"{name}.lock"):
            made[name] = TargetModel(MODELS[name](), ModelOptions(compile=True), frozen=True)
            assert made[name].compiled is not None
    return made


def attend_apart(num_rows: int) -> Any:
    """Causal attention within each of the rows that are fed one after another."""

    def attend(layer: int, spec: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.view(num_rows, -1, *tensor.shape[1:]) for tensor in qkv)
        bias = additive_mask(torch.ones(1, query.shape[1], query.shape[1], dtype=torch.bool).tril(), query.dtype)
        out = masked_attention(query, key, value, bias, spec).flatten(0, 1)
        return out.transpose(0, 1).contiguous().transpose(0, 1)  # what a backend returns may lie in any order

    return attend
