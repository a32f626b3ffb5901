"""Stand-ins for fused kernels on the CPU: the operations themselves, and the kernels' text, run by plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from emssd_flashinfer.fused import Group
from emssd_flashinfer.kernel_source import kernel_source, num_elements
from emssd_flashinfer.traced import Op, Value, run
from torch.utils._pytree import tree_map

__all__ = ["Read", "Twins", "as_it_is"]


class Twins:
    """Kernels that do what they stand for, operation by operation."""

    inexact: frozenset[Any] = frozenset()

    def __init__(self, wrapped: Callable[[Callable[..., None]], Callable[..., None]] = lambda function: function):
        self._wrapped = wrapped

    def prove(self, device: torch.device, dtype: torch.dtype) -> None:
        """They are what they stand for."""

    def __call__(self, group: Group) -> Callable[..., None]:
        return self._wrapped(partial(as_it_is, group))


def as_it_is(group: Group, *tensors: torch.Tensor) -> None:
    """Compute the outputs from the inputs, as a kernel does."""
    given = dict(zip(group.inputs, tensors, strict=False))

    def tensor(each: Any) -> Any:
        return given.get(each, each) if isinstance(each, Value) else each

    ops = [Op(op.function, *tree_map(tensor, (op.args, op.kwargs)), None if op.stores else op.out) for op in group.ops]
    for target, source in zip(tensors[len(group.inputs) :], run(ops, group.outputs), strict=True):
        target.copy_(source)


class Read(Twins):
    """Kernels whose text is run, program by program.

    Attributes:
        texts: that were read.
    """

    BLOCK = 64

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def __call__(self, group: Group) -> Callable[..., None]:
        text = kernel_source("fused", group.ops, group.inputs, group.outputs)
        self.texts.append(text)
        names = {"tl": _LANGUAGE, "exp": torch.exp, "rsqrt": torch.rsqrt}
        exec(text, names)
        sizes = num_elements(group.outputs, [op for op in group.ops if op.stores])
        return partial(self._launch, names["fused"], sizes)

    def _launch(self, function: Any, sizes: list[int], *tensors: torch.Tensor) -> None:
        for program in range(sum(math.ceil(size / self.BLOCK) for size in sizes)):
            _LANGUAGE.program_id = lambda axis, program=program: program
            function(*(_Pointer(each) for each in tensors), *sizes, self.BLOCK)


class _Pointer:
    """The start of a tensor, or places after it."""

    def __init__(self, tensor: torch.Tensor, places: Any = 0) -> None:
        length = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self.memory = tensor if tensor.dim() == 1 and tensor.stride() == (1,) else tensor.as_strided((length,), (1,))
        self.places = places

    def __add__(self, places: Any) -> _Pointer:
        return _Pointer(self.memory, self.places + places)


def _load(pointer: _Pointer, mask: torch.Tensor) -> torch.Tensor:
    assert pointer.places.shape == mask.shape, "Triton takes a mask with a block of pointers"
    places = torch.where(mask, pointer.places, 0)
    return torch.where(mask, pointer.memory[places], torch.tensor(-7, dtype=pointer.memory.dtype))  # nobody may use it


def _store(pointer: _Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    assert value.dtype == pointer.memory.dtype
    assert pointer.places.shape == mask.shape, "as above"
    pointer.memory[pointer.places[mask]] = value.expand(mask.shape)[mask]


_LANGUAGE = SimpleNamespace(
    arange=torch.arange, div_rn=torch.div, load=_load, store=_store, abs=torch.abs,
    where=lambda condition, one, other: torch.where(torch.as_tensor(condition), one, other),
    float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, constexpr=int,
)  # fmt: skip
