"""What a model is beside its tensors, in words that another process finds again; and the hooks on it."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from emssd.errors import CompileError
from emssd.model.int8 import SCALE

__all__ = ["describe_classes", "describe_modules", "hooks_of", "named_tensors", "refuse_hooks"]

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_OF_A_CHECKPOINT = frozenset({"generation_config", "name_or_path", "_is_hf_initialized"})
_PLAIN = (bool, int, float, complex, str, bytes, range, slice, enum.Enum)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_HAVE_A_VERSION = frozenset({"builtins", "abc", "typing", "collections", "torch"})  # which stands for their source


class _UnknownError(Exception):
    """The name of a type whose values cannot be recognised."""


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by each of its names, but for the scales of int8 weights, which no program reads."""
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in every if not name.endswith(f".{SCALE}")}


def hooks_of(model: torch.nn.Module) -> Iterator[tuple[str, Mapping[int, Any]]]:
    """The tables of hooks that run with a module's forward, by the name of the module; those of all modules first."""
    of_all = torch.nn.modules.module
    for hooks in (of_all._global_forward_hooks, of_all._global_forward_pre_hooks):
        yield "every module", hooks
    for name, module in model.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            yield name or "the model", hooks


def patched_in(module: torch.nn.Module) -> str | None:
    """A method that this one module has in the place of its class's, such as a ``forward`` that was set on it."""
    of_class = type(module)
    return next((key for key in vars(module) if inspect.isfunction(getattr(of_class, key, None))), None)


def refuse_hooks(model: torch.nn.Module) -> None:
    """Refuse code that runs with a module's forward without being part of it.

    Raises:
        CompileError: there is some.
    """
    name = type(model).__name__
    if place := next((place for place, hooks in hooks_of(model) if hooks), None):
        raise CompileError(f"{name} has a forward hook on {place}, which a program would not call; remove it first")
    for place, module in model.named_modules():
        if (method := patched_in(module)) is not None:
            raise CompileError(
                f"{name} has its {method} replaced on {place or 'the model'}, which a later run could not recognise; "
                f"give that module a class of its own"
            )


def describe_modules(model: torch.nn.Module) -> Iterator[str]:
    """Each module's class, and what it holds beside tensors and modules.

    Raises:
        CompileError: it holds what a later run could not recognise.
    """
    words, first = _Words(strict=True), dict[torch.nn.Module, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        yield f"{name} is {first.setdefault(module, name)}: {_name(type(module))}, training={module.training}"
        for key, value in vars(module).items():
            if key in _OF_EVERY_MODULE or key in _OF_A_CHECKPOINT:
                continue
            try:
                yield f"{key}={words.of(value)}"
            except _UnknownError as error:
                raise CompileError(
                    f"{type(model).__name__} has a {error} in {name or 'the model'}.{key}, which a later run could not "
                    f"recognise"
                ) from error


def describe_classes(model: torch.nn.Module) -> Iterator[str]:
    """The source of each class, and its functions as they are, for those that were replaced.

    Raises:
        CompileError: a class has no source.
    """
    bases = {base for module in model.modules() for base in type(module).__mro__}
    words, files = _Words(strict=False), set[Path]()
    for base in sorted(bases, key=_name):
        if base.__module__.split(".")[0] in _HAVE_A_VERSION:
            continue
        try:
            files.add(Path(inspect.getfile(base)))
        except (TypeError, OSError) as error:
            raise CompileError(f"{base.__name__} is not defined in a file, so its code cannot be recognised") from error
        yield _name(base)
        for key, value in vars(base).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                yield f"{key}={words.of(function)}"
    yield from (file.read_text() for file in sorted(files))


class _Words:
    """Puts a value into words; what holds itself is named by a number.

    Args:
        strict: refuse what cannot be recognised, and follow functions to what they take from their module. Else a type
            stands for its values.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> str:
        """The words."""
        if value is None or isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)):
            return repr(value)
        if isinstance(value, type):
            return _name(value)
        if isinstance(value, (ModuleType, BuiltinFunctionType)):
            return f"{getattr(value, '__module__', None)}.{value.__name__}"
        if isinstance(value, torch.Tensor):  # what is computed with it is in the trace, with its content
            return f"{value.dtype} {tuple(value.shape)}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.of, value))})"
        if isinstance(value, frozenset):
            return f"{{{', '.join(sorted(map(self.of, value)))}}}"
        if isinstance(value, CodeType):
            return self.of((value.co_code, value.co_names, value.co_varnames, value.co_consts))
        if id(value) in self._seen:
            return f"#{self._seen[id(value)][0]}"
        self._seen[id(value)] = len(self._seen), value  # kept, so that nothing else gets its id
        if isinstance(value, list):
            return f"[{', '.join(map(self.of, value))}]"
        if isinstance(value, set):
            return f"{{{', '.join(sorted(map(self.of, value)))}}}"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.of(key)}: {self.of(each)}' for key, each in value.items())}}}"
        return f"{_name(type(value))}({', '.join(self._parts(value))})"

    def _parts(self, value: Any) -> Iterable[str]:
        if isinstance(value, functools.partial):
            return map(self.of, (value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return map(self.of, (value.__func__, value.__self__))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, torch.nn.Module):
            inside = {key: each for key, each in vars(value).items() if key not in _OF_EVERY_MODULE}
            return map(self.of, (inside, dict(value._modules), dict(value._parameters), dict(value._buffers)))
        if hasattr(value, "to_json_string"):  # a config of Transformers
            return [value.to_json_string()]
        if self._strict and (not hasattr(value, "__dict__") or not hasattr(type(value), "__weakref__")):
            raise _UnknownError(_name(type(value)))
        return [self.of(vars(value))] if self._strict else []

    def _function(self, function: FunctionType) -> Iterator[str]:
        yield f"{function.__module__}.{function.__qualname__}"
        yield from map(self.of, (function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                yield self.of(cell.cell_contents)
            except ValueError:  # empty so far
                yield "nothing"
        if self._strict:
            names = (name for name in function.__code__.co_names if name in function.__globals__)
            yield from (f"{name}={self.of(function.__globals__[name])}" for name in names)


def _name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"
