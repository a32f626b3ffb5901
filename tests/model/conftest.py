"""Prompts and a drafter for tiny models, and the one that several of these files compile, so that it is done once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emssd_llma import LLMAConfig, Search
from emssd_testing.models import tiny_model
from filelock import FileLock
from transformers import PreTrainedModel

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


def opt(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With biases, and with embeddings that are those of its output layer."""
    return tiny_model("opt", dtype=dtype, num_hidden_layers=1, vocab_size=VOCAB_SIZE, max_model_len=64, seed=seed)


@pytest.fixture(scope="session")
def kept_program(kernels: None) -> Path:
    """The program of `opt` on disk."""
    with FileLock(cache_dir() / "opt-float32.lock"):
        program = TargetModel(opt(), ModelOptions(compile=True)).compiled
    assert program is not None
    return program.folder
