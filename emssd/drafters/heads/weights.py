"""Fills a module with a checkpoint's tensors. Every one of them has its place, and every place its tensor."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from emssd.drafters.heads.files import Checkpoint, cannot_load
from emssd.errors import OutOfMemoryError
from emssd.model.int8 import SCALE, bytes_of, round_drafter
from emssd.native import NativeError, free_module, load_kernels

__all__ = ["drop_copies", "fill", "keep_bytes", "made_empty", "rename"]

Module = TypeVar("Module", bound=nn.Module)

_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # older versions stored what is computed


def rename(checkpoint: Checkpoint, new_name: Callable[[str], str | None]) -> dict[str, str]:
    """The names of a checkpoint's tensors, by the names of a module's parameters.

    Args:
        checkpoint: whose tensors are meant.
        new_name: the module's name for a tensor; ``None`` for one that nobody needs.

    Raises:
        ConfigError: two tensors have the same place.
    """
    names: dict[str, str] = {}
    for name in checkpoint.tensors:
        new = None if _COMPUTED.search(name) else new_name(name)
        if new is None:
            continue
        if new in names:
            raise cannot_load(checkpoint.path, f"its weights {names[new]} and {name} are for the same place")
        names[new] = name
    return names


def drop_copies(names: dict[str, str], checkpoint: Checkpoint, model: Any) -> None:
    """Forget tables of embeddings and logits that are copies of the target's, which need no memory of their own.

    Args:
        names: see `rename`; ``embed_tokens.weight`` and ``lm_head.weight`` are looked at.
        checkpoint: whose tensors are meant.
        model: the target.
    """
    tables = {"embed_tokens.weight": model.get_input_embeddings(), "lm_head.weight": model.get_output_embeddings()}
    for place, table in tables.items():
        weight = getattr(table, "weight", None)
        if weight is None or place not in names:
            continue
        tensor = checkpoint.tensors[names[place]]
        if tensor.shape == weight.shape and torch.equal(tensor.to(weight), weight):
            del names[place]


def made_empty(make: Callable[[], Module]) -> Module:
    """A module without memory for its weights, which `fill` gives to it."""
    with torch.device("meta"):
        return make()


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a module its weights; then it is ready for inference.

    Args:
        module: from `made_empty`.
        checkpoint: where the weights are.
        names: see `rename`.
        dtype: of floating point weights; others keep theirs.
        device: of all.

    Raises:
        ConfigError: weights are missing, left over, or have other shapes than the module.
        OutOfMemoryError: the device has no room for them.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: tuple(checkpoint.tensors[old].shape) for name, old in names.items()}
    wrong = [
        f"{names[name]} ({_shape(given[name])} in place of {_shape(shape)})"
        for name, shape in wanted.items()
        if given.get(name, shape) != shape
    ]
    faults = [
        ("missing", [name for name in wanted if name not in given]),
        ("of another shape than its config and the target say", wrong),
        ("without a place in such a head", [names[name] for name in given if name not in wanted]),
    ]
    if told := [f"{_listed(found)} {'is' if len(found) == 1 else 'are'} {what}" for what, found in faults if found]:
        raise cannot_load(checkpoint.path, f"of its weights, {'; '.join(told)}")
    try:
        state = {name: _moved(checkpoint.tensors[old], dtype, device) for name, old in names.items()}
        module.load_state_dict(state, assign=True)
        module.to(device)  # buffers that no file holds
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{device} has no room for the trained head {checkpoint.path!r}") from error
    module.eval().requires_grad_(False)


def _moved(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy, so that the file is not read again whenever memory is short."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "a single number"


class _ByteLinear(nn.Module):
    """A linear layer that was rounded by `emssd.model.int8.round_weights`, in the layout of the kernel."""

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
