"""`keep_bytes`: linear layers that are rounded to a byte for each weight, and read so by a kernel."""

from __future__ import annotations

import weakref
from typing import TypeVar

import torch
from torch import nn

from emssd.model.compile.int8 import SCALE, bytes_of, round_drafter
from emssd.native import NativeError, free_module, load_kernels

__all__ = ["keep_bytes"]

Module = TypeVar("Module", bound=nn.Module)


class _ByteLinear(nn.Module):
    """A linear layer that was rounded by `emssd.model.compile.int8.round_weights`, in the layout of the kernel."""

    def __init__(self, rounded: nn.Linear) -> None:
        super().__init__()
        kernels, scale = load_kernels(), getattr(rounded, SCALE)
        self._linear, self._size = kernels.linear.default, rounded.out_features
        self._handle: torch.Tensor = kernels.new_module()
        weakref.finalize(self, free_module(), int(self._handle)).atexit = False
        bias = None if rounded.bias is None else rounded.bias.detach()
        kernels.add_weight(self._handle, bytes_of(rounded.weight.detach(), scale), bias, scale)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._linear(inputs.contiguous(), self._handle, 0, self._size)
        return outputs


def keep_bytes(module: Module) -> Module | _ByteLinear:
    """`module` with such layers in the place of all of its linear layers, where there are kernels for its type."""
    try:
        load_kernels()
    except NativeError:
        return module
    round_drafter(module)
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            setattr(parent, name, _kept(child))
    return _kept(module)


def _kept(module: Module) -> Module | _ByteLinear:
    return _ByteLinear(module) if isinstance(module, nn.Linear) and hasattr(module, SCALE) else module
