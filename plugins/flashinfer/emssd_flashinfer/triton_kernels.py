"""Compiles the kernels of fused operations with Triton, and proves its functions on all that they may be given."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from emssd_flashinfer.fused import Group
from emssd_flashinfer.kernel_source import FUNCTIONS, kernel_source, num_elements
from emssd_flashinfer.traced import Op, Value

__all__ = ["TritonKernels"]

_BLOCK, _CHUNK, _INFINITY = 1024, 1 << 24, 0x7F800000
# What PyTorch's kernels are compiled to; Triton's own `rsqrt` takes subnormal numbers for zeros.
_HEAD = """import triton
import triton.language as tl
from triton.language.extra.libdevice import exp

@triton.jit
def rsqrt(x):
    return tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

@triton.jit
"""


class TritonKernels:
    """A `Kernels` of Triton, `head` before each. Groups of the same text share one, whatever their number of tokens."""

    def __init__(self, head: str = _HEAD) -> None:
        self._head, self._compiled = head, dict[str, Any]()
        self.inexact: frozenset[Any] = frozenset()

    def prove(self, device: torch.device, dtype: torch.dtype) -> None:
        self.inexact = inexact_functions(self, device, dtype)

    def __call__(self, group: Group) -> Callable[..., None]:
        text = kernel_source("fused", group.ops, group.inputs, group.outputs)
        sizes = num_elements(group.outputs, [op for op in group.ops if op.stores])
        if text not in self._compiled:
            whole, file = self._head + text, f"<fused kernel {len(self._compiled)}>"
            linecache.cache[file] = (len(whole), None, whole.splitlines(keepends=True), file)  # Triton reads it there
            names: dict[str, Any] = {"__name__": __name__}
            exec(compile(whole, file, "exec"), names)
            self._compiled[text] = names["fused"]
        kernel = self._compiled[text][(sum(math.ceil(size / _BLOCK) for size in sizes),)]
        # Products and sums round apart, as in PyTorch's own kernels.
        return partial(_launch, partial(kernel, BLOCK=_BLOCK, enable_fp_fusion=False), tuple(sizes))


def _launch(kernel: Callable[..., None], sizes: tuple[int, ...], *tensors: torch.Tensor) -> None:
    kernel(*tensors, *sizes)


def inexact_functions(
    kernels: Callable[[Group], Callable[..., None]], device: torch.device, dtype: torch.dtype, last: int = _INFINITY
) -> frozenset[Any]:
    """The `FUNCTIONS` that have other bits in a kernel.

    All 2¹⁶ numbers of `dtype` are tried. For the root of a mean, it is those of float32, in the order of their bits,
    before `last`; all positive ones by default.
    """
    found = set()
    for function in FUNCTIONS:
        wide = function is torch.ops.aten.rsqrt.default
        stop = last if wide else 1 << 16
        for start in range(0, stop, _CHUNK):
            bits = torch.arange(start, min(start + _CHUNK, stop), dtype=torch.int32, device=device)
            numbers = bits.view(torch.float32) if wide else bits.to(torch.int16).view(dtype)
            expected, given = function(numbers), Value(numbers)
            out, result = Value(expected), torch.empty_like(expected)
            kernels(Group([Op(function, (given,), {}, out)], [given], [out]))(numbers, result)
            if not bool(((result == expected) | (result.isnan() & expected.isnan())).all()):
                found.add(function)
                break
    return frozenset(found)
