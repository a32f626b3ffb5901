"""Arithmetic that gives a row the same bits in any batch, for models on a CPU.

PyTorch's matrix products add up in an order that depends on the number of rows, and its activations compute the last
numbers of a tensor, or of a thread's part of it, by another formula. `BatchInvariant` replaces both in the thread that
enters it. Nothing of the model or of PyTorch is written to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F  # PyTorch's own name for it
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from emssd.errors import UnsupportedModelError
from emssd.model.hf.device_map import is_spread
from emssd.native import load_kernels, why_unavailable

__all__ = ["Audit", "arithmetic_of"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_VECTORS = 64  # numbers; of each type a whole number of PyTorch's vectors, taken two at a time
_GRAIN = 32_768  # numbers that PyTorch gives a thread at least


def arithmetic_of(model: Any, device: torch.device) -> BatchInvariant:
    """The arithmetic for a model with its logits on `device`. Raises UnsupportedModelError: there is none."""
    if is_spread(model):
        why: str | None = "Accelerate moves it from device to device"
    elif device.type != "cpu":
        why = f"it is on {device}"
    elif model.dtype not in _DTYPES:
        why = f"no kernel computes {str(model.dtype).removeprefix('torch.')}"
    else:
        why = why_unavailable()  # which may build the kernels
    if why is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not batch-invariant: {why}; leave model.batch_invariant out"
        )
    return BatchInvariant()


class BatchInvariant(TorchFunctionMode):
    """Within, what this thread computes of a row on a CPU does not depend on the rows beside it.

    Gradients are PyTorch's. One object may be entered by several threads.

    Attributes:
        missed: names of operators in an `Audit` that are not replaced, though their bits may depend on the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        load_kernels()
        self.missed = set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (rule := _RULES.get(func)) is not None and (result := rule(func, *args, **kwargs)) is not None:
            return result
        return func(*args, **kwargs)


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's own has no annotations
    """Within, operators that PyTorch runs itself are noted as `missed`, unless they are known to keep a row's bits.

    These are views, operators on integers, those that round once (`_EXACT`), and those along or of a row (`_BY_ROW`).
    """

    def __init__(self, arithmetic: BatchInvariant) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._missed = arithmetic.missed
        self._missed.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        first = results[0] if isinstance(results, (tuple, list)) and results else results
        if isinstance(first, torch.Tensor) and first.is_floating_point() and not func.is_view:
            replaced = torch._C._is_torch_function_all_disabled()  # as the rules do, and attention
            if not replaced and not _keeps_bits(func, first, args, kwargs):
                self._missed.add(func.overloadpacket.__name__)
        return results


def _keeps_bits(operator: Any, first: Any, args: Any, kwargs: Any) -> bool:
    name = operator.overloadpacket.__name__.removesuffix("_")
    if name in ("mm", "bmm", "matmul"):
        return bool(args[0].shape[-1] == 1)  # nothing is added up
    power = args[1] if name == "pow" and isinstance(args[1], (int, float)) else None
    if name == "rsqrt" or power == -0.5 or (name in ("add", "sub") and kwargs.get("alpha", 1) != 1):
        return first.dtype is not torch.bfloat16  # some numbers of which are rounded twice
    if name == "pow":
        return power in (0.5, 2, 3) or (first.ndim == 1 and not isinstance(args[0], torch.Tensor))  # frequencies
    return name in _KNOWN


class _Linear(torch.autograd.Function):
    """The kernel, with the gradients of `torch.nn.functional.linear`."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(source, weight)
        return _product(source, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, weight = ctx.saved_tensors
        grad, wanted = grads[0], ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if wanted[0] else None,
            rows.t() @ source.flatten(0, -2) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )


def _product(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return cast("torch.Tensor", torch.ops.emssd_native.plain_linear.default(source, weight, bias))


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:  # noqa: A002 - PyTorch's name
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if input.dtype not in _DTYPES or any(one.device.type != "cpu" or one.dtype != input.dtype for one in tensors):
        return None
    with torch._C.DisableTorchFunction():
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            source = input if input.ndim > 1 else input.unsqueeze(0)
            out: torch.Tensor = _Linear.apply(source, weight, bias)  # type: ignore[no-untyped-call]  # not annotated
            return out if input.ndim > 1 else out.squeeze(0)
        return _product(input, weight, bias)


def _matmul(func: Any, input: torch.Tensor, other: torch.Tensor, **more: Any) -> torch.Tensor | None:  # noqa: A002
    if more or not isinstance(other, torch.Tensor) or other.ndim != 2:
        return None
    return _linear(func, input, other.t())


def _addmm(func: Any, *args: torch.Tensor, **more: Any) -> torch.Tensor | None:
    return None if more or len(args) != 3 or args[0].ndim != 1 else _linear(func, args[1], args[2].t(), args[0])


def _by_element(func: Callable[..., torch.Tensor], input: torch.Tensor, *args: Any, **more: Any) -> Any:  # noqa: A002
    """A function of each number, on so many numbers that every thread fills its vectors."""
    if input.device.type != "cpu" or not input.is_floating_point():
        return None
    count = size = input.numel()
    while size % (_VECTORS * (threads := max(1, min(torch.get_num_threads(), math.ceil(size / _GRAIN))))):
        size += _VECTORS * threads - size % (_VECTORS * threads)
    with torch._C.DisableTorchFunction():
        if size == count:
            return func(input.contiguous(), *args, **more)
        more.pop("inplace", None)
        filled = F.pad(input.reshape(-1), (0, size - count))
        return func(filled, *args, **more)[:count].view(input.shape)


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
_ELEMENTS = (F.silu, F.gelu, F.softplus, F.sigmoid, F.tanh, F.mish, F.elu, F.logsigmoid, torch.sigmoid, torch.tanh,
             torch.Tensor.sigmoid, torch.Tensor.tanh, torch.exp, torch.Tensor.exp, torch.sin, torch.Tensor.sin,
             torch.cos, torch.Tensor.cos, torch.erf, torch.special.expm1, torch.expm1, torch.Tensor.expm1,
             torch.log, torch.Tensor.log, torch.log1p, torch.Tensor.log1p)  # fmt: skip
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_PRODUCTS, _matmul),
    **dict.fromkeys(_ELEMENTS, _by_element),
    F.linear: _linear,
    torch.addmm: _addmm,
}
_EXACT = (
    "abs add sub rsub mul multiply div neg sqrt reciprocal square clamp clamp_min clamp_max maximum minimum max min "
    "relu relu6 leaky_relu hardtanh threshold round floor ceil trunc sign sgn where masked_fill nan_to_num dropout"
)
_BY_ROW = (
    "embedding layer_norm native_layer_norm rms_norm mean sum softmax _softmax log_softmax _log_softmax amax amin "
    "topk sort linalg_vector_norm cumsum cat concat stack index index_select index_add index_put index_copy gather "
    "take_along_dim scatter scatter_add repeat repeat_interleave broadcast_tensors roll flip pad constant_pad_nd tril "
    "triu type_as _to_copy copy clone contiguous detach lift_fresh fill zero empty empty_like new_empty zeros "
    "zeros_like new_zeros ones ones_like new_ones full full_like new_full arange scalar_tensor "
    "packed_embedding packed_linear"
)
_KNOWN = frozenset(f"{_EXACT} {_BY_ROW}".split())
