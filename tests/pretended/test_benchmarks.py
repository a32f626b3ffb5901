"""The GPU benchmark's pieces on the pretended device: their CUDA graphs hold nothing that cannot be recorded."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from emssd.model import ModelOptions, TargetModel
from emssd.model.load.loading import counting_model
from tests.benchmarks.conftest import load as load
from tests.pretended.conftest import pytestmark as pytestmark


def test_pieces_are_recorded(load: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, products = load("gpu"), load("gpu_products")
    model = counting_model(load("gpu_measure").SHAPES["tiny"], torch.float32, torch.device("cpu"))
    device = request.getfixturevalue("device")  # only after Transformers' modules have been imported
    libraries: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    for name, value in {"TOKENS": (1,), "TUNED": (8,), "_LAUNCHES": 2}.items():
        monkeypatch.setattr(products, name, value)
    only = ["host", "products", "tuned", "loop"]
    chosen = Namespace(device="cuda", only=only, quick=True, batch=[2], new_tokens=8, repeats=2, acceptance_length=4.0)
    for name, measure in gpu.pieces(
        TargetModel(model.to("cuda"), ModelOptions(max_model_len=40, compile=False)), "tiny", chosen
    ):
        assert measure().get("equal_rows", 2) == 2, name
        assert not device.illegal, (name, device.illegal)
    assert {*libraries} == {"cublas", "cublaslt", "default"}
