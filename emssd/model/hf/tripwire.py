"""`Structure`: the tensors and modules of a model, to notice that one was replaced or written to.

No values are read. Writes that PyTorch does not count go unnoticed: by fused optimizers, to ``tensor.data``, by NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all

from emssd.errors import UnsupportedModelError

__all__ = ["Structure", "changed", "refuse_training"]

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_SAME_IN_TRAINING = {nn.Linear, nn.Embedding, nn.Identity, nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh}

Marks = dict[str, tuple[Any, ...]]
"""By name, objects that are compared by identity, and numbers."""


class Structure:
    """A model as it is now.

    Attributes:
        tensors: the object, version and address of each parameter and buffer.
        modules: the object, class, forward, hooks and mode of each module; under ``its config`` that of the model.
    """

    def __init__(self, model: Any) -> None:
        everywhere = (*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values())
        self.tensors: Marks = {}
        self.modules: Marks = {"a hook of all modules": everywhere, "its config": (str(model.config.to_dict()),)}
        for name, module in model.named_modules():
            values, kind = vars(module), type(module)
            hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
            marks = module, kind, kind.forward, values.get("forward"), module.training, *hooks
            self.modules[name or "the model"] = marks
            for key, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None:
                    self.tensors[f"{name}.{key}"] = tuple(_marks(tensor))


def changed(before: Marks, now: Marks) -> str | None:
    """The first name that is in one only, or has other marks."""
    return next((name for name in now | before if not _same(now.get(name, ()), before.get(name, ()))), None)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is b or (isinstance(a, (int, str)) and a == b) for a, b in pairs)


def _marks(tensor: Any) -> Iterator[Any]:
    """The tensor, its version and its address; of its parts, if it is quantized or a shard."""
    yield tensor
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in _PLAIN:
        for name in tensor.__tensor_flatten__()[0]:
            yield from _marks(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield -1 if tensor.is_inference() else tensor._version
        yield 0 if tensor.is_meta else tensor.data_ptr()


def refuse_training(model: nn.Module) -> None:
    """Raises UnsupportedModelError: a module is in training mode, and computes something else in it."""
    for name, module in model.named_modules():
        if module.training and type(module) not in _SAME_IN_TRAINING:
            part = f" in {name}" if name else ""
            raise UnsupportedModelError(
                f"{type(model).__name__} is in training mode{part}, where dropout draws at random; call model.eval()"
            )
