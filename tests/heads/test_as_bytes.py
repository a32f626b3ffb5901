"""Layers that keep their weights as bytes compute what rounded ones do.

Oracle: the module itself, with rounded weights.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from emssd.drafters.heads.weights import keep_bytes
from emssd.model.int8 import round_weights
from emssd.native import NativeError, load_kernels


def some() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(21, 40), nn.ModuleDict({"a": nn.Linear(40, 40, bias=False)})["a"], nn.Linear(40, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_all_layers_within_are_as_if_rounded(kernels: None, dtype: torch.dtype) -> None:
    module = some().to(dtype)
    rounded = copy.deepcopy(module)
    round_weights(rounded)
    kept = keep_bytes(copy.deepcopy(module))
    assert not [each for each in kept.modules() if isinstance(each, nn.Linear)]
    assert not [*kept.parameters()]
    inputs = torch.randn(3, 2, 21).to(dtype)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close(kept(inputs), rounded(inputs), **close)
    assert not torch.equal(kept(inputs), module(inputs))


def test_a_layer_by_itself_is_freed_with_its_bytes(kernels: None) -> None:
    layer = keep_bytes(nn.Linear(4, 3))
    handle = layer._handle
    load_kernels().linear(torch.ones(1, 4), handle, 0, 3)
    del layer
    gc.collect()
    with pytest.raises((IndexError, RuntimeError)):
        load_kernels().linear(torch.ones(1, 4), handle, 0, 3)


def test_what_there_is_no_kernel_for_stays(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = some().double()
    assert keep_bytes(module) is module
    assert [type(each) for each in module] == [nn.Linear] * 3

    def none() -> None:
        raise NativeError("no C++ compiler", "no compiler")

    monkeypatch.setattr("emssd.drafters.heads.weights.load_kernels", none)
    layer = nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    assert keep_bytes(layer) is layer
    assert torch.equal(layer.weight, before)
