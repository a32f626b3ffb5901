"""Whether a model is still the one that a program was compiled from, at the price of some comparisons."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from emssd.model.module_state import hooks_of, named_tensors

__all__ = ["Changes"]

_COMPARED = (bool, int, float, str, FunctionType, BuiltinFunctionType, functools.partial)


class Changes:
    """Notices weights, modules, hooks, functions and numbers of a model that are no longer those of its making.

    What is written in place through ``.data`` goes unnoticed: PyTorch does not count it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = list(model.named_modules())
        self._hooks = list(hooks_of(model))
        self._places: list[tuple[str, dict[str, Any], str, Any]] = []
        for name, module in self._model:
            prefix = f"{name}." if name else ""
            for table in (module._parameters, module._buffers, module._modules):
                self._places += [(prefix + key, table, key, value) for key, value in table.items()]
            values = vars(module)
            self._places += [
                (prefix + key, values, key, each) for key, each in values.items() if type(each) in _COMPARED
            ]
        tensors = named_tensors(model).items()
        self._tensors = [(name, tensor, _stamp(tensor)) for name, tensor in tensors]

    def first(self) -> str | None:
        """Where the model has changed, or ``None``."""
        for name, table, key, value in self._places:
            if table.get(key) is not value:
                return name
        for name, tensor, stamp in self._tensors:
            if _stamp(tensor) != stamp:
                return name
        for name, hooks in self._hooks:
            if hooks:
                return f"a hook on {name}"
        for name, module in self._model:
            if "forward" in vars(module):
                return f"{name}.forward"
        return None


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one when the tensor is written to, or gets other memory."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
