"""A byte for each weight of a linear layer, on CPUs: for a target with `model.weights=int8`, and for drafts."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F

from emssd.errors import ConfigError

__all__ = ["SCALE", "Rounded", "bytes_of", "is_rounded", "round_drafter", "round_weights", "rounded", "scales_of"]

SCALE = "int8_scale"
"""The name of a buffer that each rounded layer has."""

_MOST, _GROUP, _PIECE = 127, 32, 1 << 18


class Rounded(NamedTuple):
    """A rounded copy of a weight.

    Attributes:
        values: ``[out, in]`` int8.
        scale: ``[out]`` float32 by output, or ``[out, groups]`` bfloat16 by 32 inputs, with values from -8 to 7.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """``[out, in]`` the rounded numbers."""
        wide = self.scale.to(torch.float32).view(len(self.scale), -1)
        if self.scale.ndim == 2:
            wide = wide.repeat_interleave(_GROUP, 1)[:, : self.values.shape[1]]
        return (self.values * wide).to(dtype)


@torch.no_grad()
def rounded(weight: torch.Tensor, bits: int) -> Rounded:
    """A copy of ``weight [out, in]``, with 8 bits by output, or 4 bits in groups of 32 inputs.

    Weights that are not finite give scales that are not.
    """
    pieces = torch.split(weight, max(1, _PIECE // weight.shape[1]))  # each stays in the processor's cache
    if len(pieces) > 1:
        return Rounded(*map(torch.cat, zip(*(rounded(piece, bits) for piece in pieces), strict=True)))
    wide = weight.to(torch.float32)
    if bits == 8:
        largest = wide.abs().amax(dim=1)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest / _MOST)
        return Rounded((wide / scale.unsqueeze(1)).nan_to_num(0).round().to(torch.int8), scale)
    num_out, num_in = weight.shape
    groups = F.pad(wide, (0, -num_in % _GROUP)).view(num_out, -1, _GROUP)
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    # The number farthest from 0 becomes -8, so the scale has the other sign.
    scale = torch.where(highest.abs() > lowest.abs(), highest, lowest).div(-8).to(torch.bfloat16)
    by = torch.where(scale == 0, torch.ones_like(scale), scale).to(torch.float32).unsqueeze(-1)
    values = (groups / by).round_().nan_to_num_(0).clamp_(-8, 7).to(torch.int8)
    return Rounded(values.view(num_out, -1)[:, :num_in].contiguous(), scale)


@torch.no_grad()
def round_weights(model: torch.nn.Module) -> int:
    """Round the weights of all `torch.nn.Linear` to integers from -127 to 127, times one scale for each output.

    The weights stay tensors of their type, so the model runs as any other; a compiled program keeps a byte of each.
    Embeddings that share their tensor with a linear layer are rounded with it. Returns how many weights were rounded.
    """
    scales, count = dict[int, torch.Tensor](), 0
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear) or module.weight.ndim != 2:
            continue
        weight = module.weight
        if not weight.is_floating_point() or type(weight) is not torch.nn.Parameter:
            raise ConfigError("model.weights=int8: the model is quantized already; leave it out")
        if weight.data_ptr() not in scales:
            copy = rounded(weight, 8)
            if not copy.scale.isfinite().all():
                raise ConfigError("model.weights=int8: some weights are infinite, or no numbers; leave it out")
            weight.copy_(copy.dense(weight.dtype))
            scales[weight.data_ptr()] = copy.scale
            count += weight.numel()
        module.register_buffer(SCALE, scales[weight.data_ptr()], persistent=False)
    return count


def round_drafter(module: torch.nn.Module) -> None:
    """`round_weights` of a module that is compiled and only drafts, where there are kernels for it."""
    weight = next(module.parameters())
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16):
        with contextlib.suppress(ConfigError):  # weights that are no numbers draft as badly as they are
            round_weights(module)


def scales_of(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """The scales ``[out]`` in float32 of rounded weights ``[out, in]``, by the address of the weight."""
    return {
        module.weight.data_ptr(): getattr(module, SCALE)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and hasattr(module, SCALE)
    }


def bytes_of(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The integers of a rounded weight ``[out, in]``, as int8, also of products that bfloat16 rounded."""
    return (weight.float() / scale.unsqueeze(1)).round().to(torch.int8)


def is_rounded(weight: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether ``weight [out, in]`` still is what `bytes_of` was made of."""
    return torch.equal((rounded * scale.unsqueeze(1)).to(weight.dtype), weight)
