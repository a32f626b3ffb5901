"""The key of a compiled program on disk: versions, values and code by names and sources that every process finds alike.

Code and values without such a name, as a user's own, make a program for one process. Each program is also compared
with its module, see `emssd.model.compile.compiled`.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from emssd.errors import CompileError
from emssd.model.hf.probe import ProbeRows
from emssd.native import kernels_key

if TYPE_CHECKING:
    from emssd.model.hf.hooked import HookedModel

__all__ = ["UnnamedError", "fingerprint", "named_tensors", "refuse_hooks", "short_pass"]

_CALLERS = {"generate", "init_continuous_batching"}  # which call a model, and which it does not call
_MAKING = {"__init__", "__setstate__"}  # torch.compile once in a process replaces those of all modules
_LONGEST = 8  # tokens of a sequence of a short pass, so that it is one for all limits of length
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_OF_A_CHECKPOINT = frozenset({
    "generation_config", "name_or_path", "_is_hf_initialized", "_name_or_path", "_attn_implementation_internal",
})  # fmt: skip
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, torch.dtype, torch.device)
_VERSIONED = sys.stdlib_module_names | {"torch"}  # their version stands for their source
_LIBRARIES = _VERSIONED | {"transformers", "transformers_modules", "peft", "accelerate", "emssd"}


class UnnamedError(Exception):
    """A later process could not recognise some code or a value; the message says which."""


def fingerprint(module: torch.nn.Module, parts: Iterable[str], *, lenient: bool = False) -> str:
    """The key of a program of `module` that depends on these `parts` too. Every process finds the same.

    Args:
        lenient: take code of any distribution by its source, and a type for values that have no name.

    Raises:
        UnnamedError: no library holds some code or value.
    """
    import transformers

    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    process = torch.get_num_threads(), torch.get_default_dtype(), autocast, kernels_key()
    versions = sys.version, torch.__version__, transformers.__version__, version("emssd")
    named = _Named(lenient)
    lines = chain(map(str, versions + process), parts, _layouts(module), named.modules(module), named.classes(module))
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()[:32]


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by each of its names."""
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))


def short_pass(target: HookedModel, run: Callable[..., torch.Tensor], hidden: Seq[int] = ()) -> list[torch.Tensor]:
    """Call `run`, as `HookedModel.run`, on two short sequences packed into one row. Returns logits ``[n, vocab]``, and
    hidden states ``[n, width]`` for each index of `hidden`.
    """
    rows = ProbeRows(target, longest=_LONGEST)
    states = dict.fromkeys(hidden, rows.tokens)
    with torch.inference_mode():
        logits = run(rows.tokens[None], rows.positions[None], rows.attend, rows.kept, hidden=states)
    return [logits[0], *(states[index][0] for index in hidden)]


def refuse_hooks(model: torch.nn.Module) -> None:
    """Raises CompileError: there is a hook, or a method put into a module, which may do more than compute."""
    name, of_all = type(model).__name__, torch.nn.modules.module
    hooked = {"every module": (*of_all._global_forward_hooks, *of_all._global_forward_pre_hooks)}
    for part, module in model.named_modules():
        hooked[part or "the model"] = (*module._forward_hooks, *module._forward_pre_hooks)
    if where := next((part for part, hooks in hooked.items() if hooks), None):
        raise CompileError(f"{name} has a forward hook on {where}, which a program would not call; remove it first")
    for part, module in model.named_modules():
        replaced = vars(module).keys() - _CALLERS
        methods = (key for key in replaced if inspect.isfunction(getattr(type(module), key, None)))
        if method := next(methods, None):
            raise CompileError(
                f"{name} has its {method} replaced on {part or 'the model'}, which may do more than compute; give "
                f"that module a class of its own"
            )


def _layouts(module: torch.nn.Module) -> Iterator[str]:
    """Each tensor's type, dtype, shape and strides, and names of one tensor."""
    first = dict[int, str]()
    for name, tensor in sorted(named_tensors(module).items()):
        layout = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        yield f"{name} is {first.setdefault(id(tensor), name)}: {layout}"


class _Named:
    """Writes down modules and classes: values as they are, code by its name and source. No order of a set counts."""

    def __init__(self, lenient: bool) -> None:
        self._lenient = lenient

    def modules(self, model: torch.nn.Module) -> Iterator[str]:
        """Each module's class, and its attributes beside tensors and modules, such as its config."""
        first = dict[torch.nn.Module, str]()
        for name, module in sorted(model.named_modules(remove_duplicate=False), key=lambda item: item[0]):
            yield f"{name} is {first.setdefault(module, name)}: {module.training}"
            for key, value in [("its class", type(module)), *sorted(vars(module).items())]:
                if key not in _OF_EVERY_MODULE | _OF_A_CHECKPOINT:
                    try:
                        yield f"{key}={self._word(value)}"
                    except UnnamedError as error:
                        raise UnnamedError(f"{error} in {name or type(model).__name__}.{key}") from None

    def classes(self, model: torch.nn.Module) -> Iterator[str]:
        """Sources of the classes, and their attributes as they are now."""
        bases = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
        for base in sorted(bases, key=_name):
            for key, value in sorted(vars(base).items()):
                value = getattr(value, "__func__", getattr(value, "fget", value))
                is_plain = isinstance(value, _PLAIN) and key[0] != "_"  # Transformers caches some
                if is_plain or (callable(value) and key not in _MAKING):
                    word = self._code if isinstance(value, FunctionType) else self._word
                    yield f"{_name(base)}.{key}={word(value)}"
        for name in sorted({base.__module__ for base in bases}):
            if name.split(".")[0] not in _VERSIONED:
                yield Path(inspect.getfile(sys.modules[name])).read_text()

    def _word(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._word, value))}]"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(self._word, value)))}}}"
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{self._word(key)}: {self._word(entry)}' for key, entry in value.items()))}}}"
        if isinstance(value, functools.partial):
            return self._word([value.func, value.args, value.keywords])
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)) and "<" not in value.__qualname__:
            return self._code(value)
        if hasattr(value, "to_json_string") or is_dataclass(value):  # a config of Transformers, or of PEFT
            names = vars(value) if hasattr(value, "__dict__") else (field.name for field in fields(value))
            values = {name: getattr(value, name) for name in names if name not in _OF_A_CHECKPOINT}
            return f"{self._code(type(value))}({self._word(values)})"
        if self._lenient:
            return _name(type(value))
        raise UnnamedError(f"a {_name(type(value))} is no library's")

    def _code(self, value: Any) -> str:
        """The name of a class or function. Its code, and that of all it wraps, stands in a library."""
        inner: Any = value
        while inner is not None:
            module = inner.__globals__["__name__"] if isinstance(inner, FunctionType) else inner.__module__
            if not self._lenient and str(module).split(".")[0] not in _LIBRARIES:
                raise UnnamedError(f"{module}.{inner.__qualname__} is no library's")
            inner = getattr(inner, "__wrapped__", None)
        return _name(value)


def _name(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"
