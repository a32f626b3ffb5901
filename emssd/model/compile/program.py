"""`Program`: a compiled program that reads the tensors of a module, and calls attention that it is handed."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, cast

import torch

from emssd.attention import NativeStep
from emssd.model.compile.fingerprint import named_tensors
from emssd.model.compile.packed import PackedLinear, panels_of, rounded, rounded_linear
from emssd.native import Entry, free_module, load_kernels

__all__ = ["CONSTANTS", "LINEARS", "PREFIX", "PROGRAM", "Attend", "Program", "attend", "declare_operators", "handle_of"]

PROGRAM, LINEARS, CONSTANTS = "program.pt2", "linears.json", "constants.pt"
PREFIX = "model."  # of the model's own names in the program

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention ``[t, heads, dim]`` of a layer's index, queries, keys and values ``[t, heads, dim]``."""


class Program:
    """A compiled program of a module. It reads the module's tensors, which must stay what and where they are.

    Weights of linear layers are copied, or with `bits` rounded; packed ones are not copied. Raises almost any exception
    if the `files` are no such program.

    Attributes:
        other_products: names of PyTorch's operators in it that add up products, other than linear layers.
    """

    def __init__(self, files: Entry, module: torch.nn.Module, bits: int | None = None) -> None:
        kernels = load_kernels()
        self._attend: Attend | None = None
        self._failure: BaseException | None = None  # of attention; PyTorch's runner may raise its own instead
        self._handle: torch.Tensor = kernels.new_module()
        number = int(self._handle)
        _PROGRAMS[number] = self
        self.free = weakref.finalize(self, free_module(), number)
        self.free.atexit = False
        tensors = named_tensors(module)
        if bits is not None:
            for name, part in module.named_modules(remove_duplicate=False):
                if isinstance(part, PackedLinear):
                    tensors[f"{name}.panels"] = panels_of(rounded_linear(part, bits))
        products = json.loads((files.folder / LINEARS).read_bytes())
        self.other_products: list[str] = products["others"]
        for linear in products["linears"]:
            biases = [tensors[name].detach() for name in linear["biases"]]
            weights = [tensors[name].detach() for name in linear["weights"]]
            if linear["transposed"]:
                weights = [weight.t().contiguous() for weight in weights]
            weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
            kernels.add_weight(self._handle, weight if bits is None else panels_of(rounded(weight, bits)), bias)
        # Without `torch._inductor.aoti_load_package`, whose imports take a second.
        names = kernels.open_program(self._handle, str(files.folder / PROGRAM))
        constants = torch.load(files.folder / CONSTANTS, weights_only=True)
        constants |= {PREFIX + name: tensor.detach() for name, tensor in tensors.items()}
        self._constants = [constants[name] for name in names]  # not copied: they must stay
        kernels.load_constants(self._handle, names, self._constants)
        self._run = kernels.run_program.default

    def __call__(
        self, inputs: list[torch.Tensor], attend: Attend, step: NativeStep | None = None
    ) -> list[torch.Tensor]:
        """Run it on the inputs that it was traced with, but the handle. `step` does what `attend` does, in C++."""
        if step is not None:
            return cast("list[torch.Tensor]", step.run(self._handle, inputs))
        self._attend = attend
        try:
            return cast("list[torch.Tensor]", self._run(self._handle, inputs))
        except Exception:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._attend = self._failure = None

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Called by the program in place of attention."""
        assert self._attend is not None, "attention outside of a step"
        try:
            return self._attend(layer, query, key, value)
        except BaseException as error:
            self._failure = error
            raise


_PROGRAMS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = count(-1, -1)  # those of `emssd.native` are positive


def handle_of(program: Any) -> torch.Tensor:
    """The handle with which the operator ``emssd::attend`` calls ``program.attend``, as it does that of a `Program`."""
    number = next(_NUMBERS)
    _PROGRAMS[number] = program
    return torch.tensor(number)


_library: Any = torch.library.Library("emssd", "DEF")  # type: ignore[no-untyped-call]  # it has no annotations
_library.define("attend(Tensor query, Tensor key, Tensor value, Tensor handle, int layer) -> Tensor")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, layer: int
) -> torch.Tensor:
    """The operator ``emssd::attend``."""
    out: torch.Tensor = _PROGRAMS[int(handle)].attend(layer, query, key, value)
    return out.contiguous()  # as the program takes it to be, and does not check


def _attend_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


for _device in ("CPU", "CUDA"):
    _library.impl("attend", attend, _device)
torch.library.register_fake("emssd::attend", _attend_shape, lib=_library)


def declare_operators() -> None:
    """Tell the compiler the shapes of our operators' results. Raises NativeError: there are no kernels."""
    load_kernels()  # asked each time: the compiler may be gone since shapes were declared
    _declare_shapes()


@cache
def _declare_shapes() -> None:
    def linear(source: torch.Tensor, *more: Any) -> torch.Tensor:  # the last is the number of outputs
        return source.new_empty(*source.shape[:-1], more[-1])

    def packed_embedding(indices: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
        return indices.new_empty(*indices.shape, width, dtype=torch.float32)

    torch.library.register_fake("emssd_native::linear", linear)
    torch.library.register_fake("emssd_native::packed_linear", linear)
    torch.library.register_fake("emssd_native::packed_embedding", packed_embedding)
    torch.library.register_fake("emssd_native::attend_layer", _attend_shape)
