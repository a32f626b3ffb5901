"""Blocks of a GGUF file as rounded weights: integers, and for each group of inputs a scale and perhaps a minimum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emssd.model.compile.packed import Rounded

__all__ = ["KINDS", "rounded_of"]

_PIECE = 1 << 22  # bytes that are unpacked at once
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def rounded_of(blocks: torch.Tensor, kind: str) -> Rounded:
    """The numbers of ``blocks [out, bytes]``, of a type in `KINDS`, without loss: a row of them is a row of weights.

    Products of a scale and a minimum are those that the file's format defines, in float32.
    """
    size, unpack = KINDS[kind]
    rows, piece = len(blocks), max(1, _PIECE // blocks.shape[1])
    wholes: list[Any] = [
        None if part is None else part.new_empty(rows, part.numel()) for part in unpack(blocks[:1].view(-1, size))
    ]
    for start in range(0, rows, piece):
        parts = unpack(blocks[start : start + piece].reshape(-1, size))
        for whole, part in zip(wholes, parts, strict=True):
            if part is not None:
                whole[start : start + piece] = part.reshape(-1, whole.shape[1])
    values, scale, minimum = wholes
    return Rounded(values, scale, minimum, bits=4 if kind.startswith("Q4") else 8)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """``[blocks, 1]`` float16."""
    return blocks[:, start : start + 2].view(torch.float16)


def _fields(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """``[blocks, numbers]`` uint8: those of `bits` bits in each run of `width` bytes, the lowest bits of all first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    runs = data.reshape(len(data), -1, 1, width) >> shifts
    return (runs & (1 << bits) - 1).flatten(1)


def _integers(low: torch.Tensor, width: int, above: torch.Tensor | None = None, *, less: int = 0) -> torch.Tensor:
    """``[blocks, numbers]`` int8: four bits of each in runs of `width` bytes, and those `above`; so much `less`."""
    values = _fields(low, 4, width)
    return (values if above is None else values | above << 4).view(torch.int8) - less


def _scale_and_minimum(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _half(blocks, 0).float(), _half(blocks, 2).float()


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[blocks, 8]`` scales and minimums, of 6 bits each in 12 bytes, times those of the block."""
    first, second, last = torch.split(blocks[:, 4:16], 4, dim=1)
    scale = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], dim=1)
    minimum = torch.cat([second & 63, (last >> 4) | (second >> 6 << 4)], dim=1)
    return _half(blocks, 0).float() * scale, -(_half(blocks, 2).float() * minimum)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    values = _integers(blocks[:, :128], 64, _fields(blocks[:, 128:192], 2, 32), less=32)
    return values, _half(blocks, 208).float() * blocks[:, 192:208].view(torch.int8), None


KINDS: dict[str, tuple[int, Callable[[torch.Tensor], _Parts]]] = {
    "Q4_0": (18, lambda data: (_integers(data[:, 2:], 16, less=8), _half(data, 0), None)),
    "Q4_1": (20, lambda data: (_integers(data[:, 4:], 16), *_scale_and_minimum(data))),
    "Q5_0": (22, lambda data: (_integers(data[:, 6:], 16, _fields(data[:, 2:6], 1, 1), less=16), _half(data, 0), None)),
    "Q5_1": (24, lambda data: (_integers(data[:, 8:], 16, _fields(data[:, 4:8], 1, 1)), *_scale_and_minimum(data))),
    "Q8_0": (34, lambda data: (data[:, 2:].view(torch.int8), _half(data, 0), None)),
    "Q4_K": (144, lambda data: (_integers(data[:, 16:], 32), *_k_scales(data))),
    "Q5_K": (176, lambda data: (_integers(data[:, 48:], 32, _fields(data[:, 16:48], 1, 32)), *_k_scales(data))),
    "Q6_K": (210, _q6_k),
}
"""The bytes of a block, and what unpacks ``[blocks, bytes]`` into values, scales and minimums, by the type's name."""
