"""The model that several of these files compile, so that it is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emssd_testing.models import tiny_model
from filelock import FileLock
from transformers import PreTrainedModel

from emssd.model import ModelOptions, TargetModel
from emssd.native import cache_dir


def opt(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With biases, and with embeddings that are those of its output layer."""
    return tiny_model("opt", dtype=dtype, num_hidden_layers=1, vocab_size=13, max_model_len=64, seed=seed)


@pytest.fixture(scope="session")
def kept_program(kernels: None) -> Path:
    """The program of `opt` on disk."""
    with FileLock(cache_dir() / "opt-float32.lock"):
        program = TargetModel(opt(), ModelOptions(compile=True)).compiled
    assert program is not None
    return program.folder
