"""`Program`: what `emssd.model.tracing` compiled, loaded with the tensors of a module, and attention handed to it."""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from emssd.model import tracing
from emssd.model.int8 import bytes_of, scales_of
from emssd.model.module_state import named_tensors
from emssd.native import Entry, free_weights, load_kernels

__all__ = ["Attend", "Program", "declare_operators"]

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a layer's index, queries, keys and values ``[t, heads, dim]``, what attention gives, ``[t, heads, dim]``."""


class Program:
    """A compiled program of a module.

    Args:
        found: where it is kept.
        module: whose tensors it reads. They must stay what and where they are; weights of linear layers are copied.

    Attributes:
        few_sizes: whether linear layers are slow at sizes that they did not meet before.

    Raises:
        Exception: of almost any kind, if that is something else.
    """

    def __init__(self, found: Entry, module: torch.nn.Module) -> None:
        kernels = load_kernels()
        self._attend: Attend | None = None
        self._failure: BaseException | None = None  # of attention; PyTorch's runner may raise its own instead
        self._weights: torch.Tensor = kernels.new_weights()
        number = int(self._weights)
        _PROGRAMS[number] = self
        self.free = weakref.finalize(self, free_weights(), number)
        self.free.atexit = False
        tensors, scales = named_tensors(module), scales_of(module)
        self.few_sizes = False
        for linear in json.loads(found.files[tracing.LINEARS]):
            biases = [tensors[name].detach() for name in linear["biases"]]
            weights = [tensors[name].detach() for name in linear["weights"]]
            scale = None
            if all(weight.data_ptr() in scales for weight in weights):
                each_scale = [scales[weight.data_ptr()] for weight in weights]
                weights = [bytes_of(*pair) for pair in zip(weights, each_scale, strict=True)]
                scale = torch.cat(each_scale)
            bias = torch.cat(biases) if biases else None
            self.few_sizes |= kernels.add_weight(self._weights, torch.cat(weights), bias, scale)
        # What `torch._inductor.aoti_load_package` wraps, without a second of imports: one model, one runner, no device.
        program = torch._C._aoti.AOTIModelPackageLoader(str(found.folder / tracing.PROGRAM), "model", True, 1, -1)
        known = torch.load(io.BytesIO(found.files[tracing.CONSTANTS]), weights_only=True)
        known |= {tracing.PREFIX + name: tensor.detach() for name, tensor in tensors.items()}
        self._constants = {name: known[name] for name in program.get_constant_fqns()}  # not copied: they must stay
        program.load_constants(self._constants, False, True, True, False)  # all of them, and none is copied
        self._run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = program.boxed_run

    def __call__(self, inputs: list[torch.Tensor], attend: Attend, num_tokens: int) -> list[torch.Tensor]:
        """Run it.

        Args:
            inputs: those that it was traced with, but the handle.
            attend: computes attention of the first `num_tokens` tokens; those behind them fill a size.
            num_tokens: that are real.
        """
        self._attend, self._num_tokens = attend, num_tokens
        try:
            return self._run([*inputs, self._weights])
        except Exception:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._attend = self._failure = None

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What the program calls in the place of attention."""
        assert self._attend is not None, "attention outside of a step"
        count = self._num_tokens
        try:
            if query.shape[0] == count:
                return self._attend(layer, query, key, value)
            out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
            out[:count] = self._attend(layer, query[:count], key[:count], value[:count])
            return out
        except BaseException as error:
            self._failure = error
            raise


_PROGRAMS: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()

_library: Any = torch.library.Library("emssd", "DEF")  # type: ignore[no-untyped-call]  # it has no annotations
_library.define("attend(Tensor query, Tensor key, Tensor value, Tensor handle, int layer) -> Tensor")


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, layer: int
) -> torch.Tensor:
    out = _PROGRAMS[handle.item()].attend(layer, query, key, value)  # type: ignore[index]  # an int64
    return out.contiguous()  # as the program takes it to be, and does not check


def _attend_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, layer: int
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_library.impl("attend", _attend, "CPU")
torch.library.register_fake("emssd::attend", _attend_shape, lib=_library)


def _linear_shape(source: torch.Tensor, handle: torch.Tensor, index: int, out_features: int) -> torch.Tensor:
    return source.new_empty(*source.shape[:-1], out_features)


def declare_operators() -> None:
    """Tell the compiler the shape of a linear layer; its operator is there once the kernels are loaded.

    Raises:
        NativeError: they cannot be built.
    """
    load_kernels()
    _declare_linear()


@cache
def _declare_linear() -> None:
    torch.library.register_fake("emssd_native::linear", _linear_shape)
