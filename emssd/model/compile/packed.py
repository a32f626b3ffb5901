"""Packed weights of linear layers and embeddings: 4 or 8 bits each, on CPUs.

A packed weight stays as it is, and the kernels of `emssd.native` compute with it. They round activations to bytes, 32
at a time, and add up integers, so what a row gets does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from emssd.errors import ConfigError
from emssd.native import load_kernels, why_unavailable

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "Rounded",
    "has_packed_kernel",
    "pack",
    "pack_model",
    "panels_of",
    "round_drafter",
    "round_weights",
    "rounded",
    "rounded_linear",
]

_BLOCK, _PIECE, _LARGEST = 32, 1 << 18, torch.finfo(torch.float16).max


class Rounded(NamedTuple):
    """A weight of small integers, ``values * scale + minimum`` by groups of inputs.

    The kernels take 4 or 8 bits with one scale in float16 for each 32 inputs, or with a scale and a minimum in float32
    for each 32; and 8 bits with a scale in float32 for each 16.

    Attributes:
        values: ``[out, in]`` int8; with 4 bits from -8 to 7, or from 0 to 15 beside a `minimum`.
        scale: ``[out, groups]`` float16 or float32, finite. The last group may be shorter.
        minimum: ``[out, groups]`` float32, what is added; ``None`` for nothing.
        bits: of a value, 4 or 8.
    """

    values: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    bits: int = 8

    @property
    def group(self) -> int:
        """Inputs with one scale, 32 or 16."""
        return _BLOCK if self.scale.dtype == torch.float16 or self.minimum is not None else _BLOCK // 2

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """``[out, in]`` the numbers, rounded to float32 once and then to `dtype`."""
        scale, minimum = (
            None if part is None else part.double().repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
            for part in (self.scale, self.minimum)
        )
        numbers = self.values * cast("torch.Tensor", scale)
        return (numbers if minimum is None else numbers + minimum).float().to(dtype)


@torch.no_grad()
def rounded(weight: torch.Tensor, bits: int) -> Rounded:
    """A copy of ``weight [out, in]`` with 4 or 8 bits, and a scale in float16 for each 32 inputs.

    Scales beyond float16 become its largest number. Weights that are no numbers give scales that are none.
    """
    pieces = torch.split(weight, _rows_of_a_piece(weight))
    if len(pieces) > 1:
        return _joined([rounded(piece, bits) for piece in pieces], bits)
    num_out, num_in = weight.shape
    groups = F.pad(weight.to(torch.float32), (0, -num_in % _BLOCK)).view(num_out, -1, _BLOCK)
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    # Of 4 bits, the number farthest from 0 becomes -8, so the scale has the other sign.
    farthest = torch.where(highest.abs() > lowest.abs(), highest, lowest)
    scale = farthest.div(-8) if bits == 4 else farthest.abs().div(127)
    scale = scale.clamp(-_LARGEST, _LARGEST).to(torch.float16)
    by = torch.where(scale == 0, torch.ones_like(scale), scale).to(torch.float32).unsqueeze(-1)
    values = (groups / by).round_().nan_to_num_(0).clamp_(*((-8, 7) if bits == 4 else (-127, 127))).to(torch.int8)
    return Rounded(values.view(num_out, -1)[:, :num_in].contiguous(), scale, bits=bits)


def rounded_linear(layer: nn.Linear, bits: int) -> Rounded:
    """`rounded` of the weight of a linear layer, which may be packed."""
    if not isinstance(layer, PackedLinear):
        return rounded(layer.weight.detach(), bits)
    pieces = torch.split(torch.arange(layer.out_features), _rows_of_a_piece(layer.weight))
    look_up = load_kernels().packed_embedding.default
    return _joined([rounded(look_up(rows, layer.panels, layer.in_features), bits) for rows in pieces], bits)


def _rows_of_a_piece(weight: torch.Tensor) -> int:
    """Rows that stay in the processor's cache."""
    return max(1, _PIECE // weight.shape[1])


def _joined(parts: Sequence[Rounded], bits: int) -> Rounded:
    return Rounded(torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts]), bits=bits)


def panels_of(weight: Rounded) -> torch.Tensor:
    """The weight in the kernel's layout, as bytes."""
    panels: torch.Tensor = load_kernels().pack(*weight)
    return panels


class _Packed(nn.Module):
    """A module whose weight is a stand-in, so its state is none to save. Copies and other dtypes have stand-ins too."""

    weight: torch.Tensor
    panels: torch.Tensor

    def _save_to_state_dict(self, *_: Any) -> None:
        raise ConfigError("a packed model cannot be saved; save the model that it was made of")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Packed:
        weight, result = self.weight, type(self).__new__(type(self))
        memo[id(self)] = result
        memo.setdefault(id(weight), _stand_in(weight.shape, weight.dtype))
        result.__dict__.update(deepcopy(self.__dict__, memo))
        return result

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        weight, number = self.weight, fn(self.weight[:1, :1])
        if not has_packed_kernel(number):
            raise ConfigError(
                f"a packed model computes on a CPU in float32 or bfloat16, not on {number.device} in {number.dtype}; "
                f"load a GGUF file with model.weights=dense, or leave model.weights=int8 out"
            )

        def applied(tensor: torch.Tensor) -> torch.Tensor:
            return number.expand(tensor.shape) if tensor is weight else fn(tensor)

        return super()._apply(applied, recurse)  # type: ignore[no-untyped-call]


class PackedLinear(_Packed, nn.Linear):
    """A linear layer whose weight is packed.

    Attributes:
        panels: the weight in the kernel's layout, bytes; a buffer.
        weight: has the shape and dtype of the weight, takes no memory, and is NaN throughout: it is not to be read.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        return load_kernels().packed_linear.default(input, self.panels, self.bias, self.out_features)  # type: ignore[no-any-return]


class PackedEmbedding(_Packed, nn.Embedding):
    """An embedding whose table is packed; see `PackedLinear`. Its rows are those of `Rounded.dense`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        rows: torch.Tensor = load_kernels().packed_embedding.default(input, self.panels, self.embedding_dim)
        return rows.to(self.weight.dtype)


def _stand_in(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full((1, 1), torch.nan, dtype=dtype).expand(shape), requires_grad=False)


def pack(model: nn.Module, name: str, weight: Rounded) -> None:
    """Put a packed weight in the place of the parameter `name`, in every linear layer and embedding that shares it.

    The parameter may be on the meta device. Its module becomes a `PackedLinear` or `PackedEmbedding` that keeps the
    code of its own class. Where a module of another kind has it, or there is no kernel for its device and dtype, the
    model gets the numbers dense, in the dtype of the parameter.
    """
    parameter = model.get_parameter(name)
    shape, dtype = parameter.shape, parameter.dtype
    assert weight.values.shape == shape, f"{name} is {tuple(shape)}, and its values {tuple(weight.values.shape)}"
    places = [(part, key) for part in model.modules() for key, one in part._parameters.items() if one is parameter]
    known = all(key == "weight" and isinstance(part, (nn.Linear, nn.Embedding)) for part, key in places)
    if not known or not has_packed_kernel(parameter):
        dense = weight.dense(dtype).to("cpu" if parameter.is_meta else parameter.device)
        shared = nn.Parameter(dense, requires_grad=False)
        for part, key in places:
            setattr(part, key, shared)
        return
    panels = panels_of(weight)
    stand_in = _stand_in(shape, dtype)
    for part, _ in places:
        part.weight = stand_in
        part.register_buffer("panels", panels, persistent=False)
        kind: Any = type(part)  # mypy takes no class for hashable
        part.__class__ = _packed_class(kind)


def pack_model(model: nn.Module, make: Callable[[str, torch.Tensor], Rounded | None]) -> int:
    """Pack the weights of all linear layers of a dense model, and embeddings that share theirs with one.

    Args:
        make: gives the packed weight of a parameter ``[out, in]`` and its name; ``None`` to leave it as it is.

    Returns:
        How many numbers were rounded.
    """
    linears = [part for part in model.modules() if isinstance(part, nn.Linear) and not isinstance(part, PackedLinear)]
    weights = {id(part.weight) for part in linears if part.weight.ndim == 2}
    count = 0
    for name, weight in [*model.named_parameters()]:
        if id(weight) in weights and (copy := make(name, weight)) is not None:
            count += weight.numel()
            pack(model, name, copy)
    return count


def round_weights(model: nn.Module) -> int:
    """Pack the linear layers of a target with 8 bits. Returns how many weights were rounded.

    Raises ConfigError: they are quantized already, or not finite.
    """

    def make(name: str, weight: torch.Tensor) -> Rounded:
        if not _is_dense(weight):
            raise ConfigError("model.weights=int8: the model is quantized already; leave it out")
        if not weight.isfinite().all():
            raise ConfigError("model.weights=int8: some weights are infinite, or no numbers; leave it out")
        return rounded(weight, 8)

    return pack_model(model, make)


def round_drafter(module: nn.Module) -> None:
    """Pack the linear layers of a module that only drafts with 8 bits, where there are kernels for it."""

    def make(name: str, weight: torch.Tensor) -> Rounded | None:
        return rounded(weight, 8) if _is_dense(weight) and has_packed_kernel(weight) else None

    pack_model(module, make)


def _is_dense(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.is_floating_point() and not weight.is_meta


@cache
def _packed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind`, with a packed weight; a method of its own, such as one that scales embeddings, calls ours by `super`."""
    base: Any = PackedLinear if issubclass(kind, nn.Linear) else PackedEmbedding
    return base if kind in base.__bases__ else type(kind.__name__, (kind, base), {"__module__": __name__})


def has_packed_kernel(weight: torch.Tensor) -> bool:
    """Whether kernels compute with a packed copy of the weight, whose device may be meta."""
    is_known = weight.device.type in ("cpu", "meta") and weight.dtype in (torch.float32, torch.bfloat16)
    return is_known and why_unavailable() is None
