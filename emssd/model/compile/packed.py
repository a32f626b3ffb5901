"""Packed weights of linear layers and embeddings: 4 or 8 bits each, on CPUs.

A packed weight stays as it is, and the kernels of `emssd.native` compute with it. They round activations to bytes, 32
at a time, and add up integers, so what a row gets does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from emssd.native import load_kernels, why_unavailable

__all__ = ["PackedEmbedding", "PackedLinear", "Rounded", "pack", "pack_model", "rounded"]

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
        return _BLOCK if self.scale.shape[1] == -(-self.values.shape[1] // _BLOCK) else _BLOCK // 2

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
    pieces = torch.split(weight, max(1, _PIECE // weight.shape[1]))  # each stays in the processor's cache
    if len(pieces) > 1:
        copies = [rounded(piece, bits) for piece in pieces]
        return Rounded(*(torch.cat([copy[i] for copy in copies]) for i in (0, 1)), bits=bits)  # type: ignore[arg-type,misc]
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


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed.

    Attributes:
        panels: the weight in the kernel's layout, bytes; a buffer.
        weight: has the shape and dtype of the weight, takes no memory, and is NaN throughout: it is not to be read.
    """

    panels: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        return _kernels().packed_linear(input, self.panels, self.bias, self.out_features)  # type: ignore[no-any-return]


class PackedEmbedding(nn.Embedding):
    """An embedding whose table is packed; see `PackedLinear`. Its rows are those of `Rounded.dense`."""

    panels: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        rows: torch.Tensor = _kernels().packed_embedding(input, self.panels, self.embedding_dim)
        return rows.to(self.weight.dtype)


def pack(model: nn.Module, name: str, weight: Rounded) -> None:
    """Put a packed weight in the place of the parameter `name`, in every linear layer and embedding that shares it.

    The parameter may be on the meta device. Its module becomes a `PackedLinear` or `PackedEmbedding` that keeps the
    code of its own class. Where a module of another kind has it, or there is no kernel for its device and dtype, the
    model gets the numbers dense, in the dtype of the parameter.
    """
    parameter = model.get_parameter(name)
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device.type
    assert weight.values.shape == shape, f"{name} is {tuple(shape)}, and its values {tuple(weight.values.shape)}"
    places = [(part, key) for part in model.modules() for key, one in part._parameters.items() if one is parameter]
    known = all(key == "weight" and isinstance(part, (nn.Linear, nn.Embedding)) for part, key in places)
    if not known or not _has_kernel(device, dtype):
        dense = weight.dense(dtype).to("cpu" if device == "meta" else device)
        shared = nn.Parameter(dense, requires_grad=False)
        for part, key in places:
            setattr(part, key, shared)
        return
    panels = _kernels().pack(weight.values, weight.scale, weight.minimum, weight.bits)
    stand_in = nn.Parameter(torch.full((1, 1), torch.nan, dtype=dtype).expand(shape), requires_grad=False)
    for part, _ in places:
        part.weight = stand_in
        part.register_buffer("panels", panels, persistent=False)
        part.__class__ = _packed_class(type(part))  # type: ignore[arg-type]


def pack_model(model: nn.Module, make: Callable[[str, torch.Tensor], Rounded | None]) -> int:
    """Pack the weights of all linear layers of a dense model, and embeddings that share theirs with one.

    Args:
        make: gives the packed weight of a parameter's name and values ``[out, in]``; ``None`` to leave it as it is.

    Returns:
        How many numbers were rounded.
    """
    linears = {
        id(part.weight)
        for part in model.modules()
        if isinstance(part, nn.Linear) and not isinstance(part, PackedLinear)
    }
    count = 0
    for name, weight in [*model.named_parameters()]:
        if id(weight) in linears and weight.ndim == 2 and (copy := make(name, weight.detach())) is not None:
            count += weight.numel()
            pack(model, name, copy)
    return count


@cache
def _packed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind`, with a packed weight; a method of its own, such as one that scales embeddings, calls ours by `super`."""
    base: Any = PackedLinear if issubclass(kind, nn.Linear) else PackedEmbedding
    return base if kind in base.__bases__ else type(kind.__name__, (kind, base), {"__module__": __name__})


def _has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether kernels compute with packed weights of a model of this dtype, on this type of device."""
    return (
        device in ("cpu", "meta")
        and dtype in (torch.float32, torch.bfloat16)
        and why_unavailable() is None
        and hasattr(_kernels(), "pack")
    )


@cache
def _kernels() -> Any:
    return load_kernels()
