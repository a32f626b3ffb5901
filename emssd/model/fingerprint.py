"""The key of a compiled program on disk: all that the program depends on, which is the whole model but its weights.

The operators of a short pass with their arguments are what the model computes, whoever changed it. What its modules
hold, and their code, may only matter in longer passes.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emssd.errors import CompileError
from emssd.model.int8 import SCALE
from emssd.model.probe import ProbeRows
from emssd.native import kernels_key

if TYPE_CHECKING:
    from emssd.model.hooked import HookedModel

__all__ = ["fingerprint", "fingerprint_of", "named_tensors", "short_pass"]

_LONGEST = 8  # tokens of a sequence of a short pass, so that its key is one for all limits of length
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_OF_A_CHECKPOINT = frozenset({"generation_config", "name_or_path", "_is_hf_initialized"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_HAVE_A_VERSION = frozenset({"builtins", "abc", "typing", "collections", "torch"})  # which stands for their source


def fingerprint(target: HookedModel, sources: Iterable[str], hidden: Seq[int] = ()) -> tuple[str, list[torch.Tensor]]:
    """The key of the program of `target`, with these `hidden` states, and what the model gives in a `short_pass`.

    Raises CompileError: a program would not run part of the model, or a later run could not recognise it.
    """
    import transformers

    model = target.model
    _refuse_hooks(model)
    tensors = named_tensors(model)
    with _Trace(tensors) as trace:
        given = short_pass(target, target.run, hidden)
    parts = chain(
        [transformers.__version__, str(target.layers)],
        _of_machine_and_code(model, tensors),
        sources,
        _modules(model),
        trace.lines,
        (f"hidden states {index}" for index in hidden),
    )
    return _digest(parts), given


def fingerprint_of(
    module: torch.nn.Module, run: Callable[[], tuple[torch.Tensor, ...]], sources: Iterable[str]
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """The key of the program of a module of ours, and what `run`, a short pass, gives.

    The module holds nothing beside its tensors that changes what `run` computes and is not seen in that.
    """
    tensors = named_tensors(module)
    with _Trace(tensors) as trace, torch.inference_mode():
        given = run()
    return _digest(chain(_of_machine_and_code(module, tensors), sources, trace.lines)), given


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by each of its names, but for the scales of int8 weights, which no program reads."""
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in every if not name.endswith(f".{SCALE}")}


def _of_machine_and_code(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    yield from (sys.version, str(torch.get_num_threads()), kernels_key())
    yield from (f"{name} {_layout(tensor)}" for name, tensor in tensors.items())
    yield from _classes(module)


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def short_pass(target: HookedModel, run: Callable[..., torch.Tensor], hidden: Seq[int] = ()) -> list[torch.Tensor]:
    """Of two short sequences packed into one row, what `run` gives, a function like `HookedModel.run`: logits
    ``[n, vocab]``, and for each of `hidden` the hidden states of that index ``[n, width]``.
    """
    rows = ProbeRows(target, longest=_LONGEST)
    states = dict.fromkeys(hidden, rows.tokens)
    with torch.inference_mode():
        logits = run(rows.tokens[None], rows.positions[None], rows.attend, rows.kept, hidden=states)
    return [logits[0], *(states[index][0] for index in hidden)]


def _refuse_hooks(model: torch.nn.Module) -> None:
    """Refuse code that runs with a module's forward without being part of it. Raises CompileError: there is some."""
    name, of_all = type(model).__name__, torch.nn.modules.module
    tables = [("every module", of_all._global_forward_hooks), ("every module", of_all._global_forward_pre_hooks)]
    for place, module in model.named_modules():
        tables += [(place or "the model", hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    for place, hooks in tables:
        if hooks:
            raise CompileError(f"{name} has a forward hook on {place}, which a program would not call; remove it first")
    for place, module in model.named_modules():
        of_class = type(module)
        if method := next((key for key in vars(module) if inspect.isfunction(getattr(of_class, key, None))), None):
            raise CompileError(
                f"{name} has its {method} replaced on {place or 'the model'}, which a later run could not recognise; "
                f"give that module a class of its own"
            )


class _Trace(TorchDispatchMode):
    """Writes down each operator with its arguments: tensors by name, by what computed them, or by content."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # it has no annotations
        self.lines: list[str] = []
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the id of one
        for name, tensor in tensors.items():
            self._name(tensor, name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import Dynamo, for a second, to keep it from tracing this."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = f"{func} {self._words(args)} {self._words(kwargs or {})}"
        result = func(*args, **(kwargs or {}))
        for place, each in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(each, torch.Tensor):
                self._name(each, f"%{len(self.lines)}.{place}")
        self.lines.append(line)
        return result

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        self._names.setdefault(id(tensor), name)
        self._alive.append(tensor)

    def _words(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._names:
                self._name(value, f"{_layout(value)} {_content(value)}")
            return self._names[id(value)]
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(self._words, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}={self._words(each)}' for key, each in value.items())}}}"
        return repr(value)


def _layout(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _content(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()


class _UnknownError(Exception):
    """The name of a type whose values cannot be recognised."""


def _modules(model: torch.nn.Module) -> Iterator[str]:
    """Each module's class, and what it holds beside tensors and modules. Raises CompileError: it holds what a later run
    could not recognise.
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


def _classes(model: torch.nn.Module) -> Iterator[str]:
    """The source of each class, and its functions as they are, for those that were replaced. Raises CompileError: a
    class has no source.
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

    If `strict`, it refuses what cannot be recognised, and follows functions to what they take from their module. Else a
    type stands for its values.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> str:
        if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)):
            return repr(value)
        if isinstance(value, type):
            return _name(value)
        if isinstance(value, (ModuleType, BuiltinFunctionType)):
            return f"{getattr(value, '__module__', None)}.{value.__name__}"
        if isinstance(value, torch.Tensor):  # what is computed with it is in the trace, with its content
            return f"{value.dtype} {tuple(value.shape)}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.of, value))})"
        if isinstance(value, CodeType):
            return self.of((value.co_code, value.co_names, value.co_varnames, value.co_consts))
        if id(value) in self._seen:
            return f"#{self._seen[id(value)][0]}"
        self._seen[id(value)] = len(self._seen), value  # kept, so that nothing else gets its id
        if isinstance(value, list):
            return f"[{', '.join(map(self.of, value))}]"
        if isinstance(value, (set, frozenset)):
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
