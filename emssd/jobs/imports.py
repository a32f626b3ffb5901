"""Imports Transformers without what only compilers and tensors on several devices need: that takes half the time."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["import_transformers"]

_DYNAMO = "torch._dynamo"


def import_transformers(*, distributed: bool) -> ModuleType:
    """Import what all models of Transformers stand on. A process that has done so already is left as it is.

    Transformers imports Dynamo to decorate a few functions for it, and the tensors of `torch.distributed` to tell them
    from others. Each brings hundreds of modules, SymPy among them, and a run uses neither. This is for a process of our
    own: what Dynamo would later make of `PreTrainedModel.can_record_outputs` is not what Transformers asked for.

    Args:
        distributed: whether models may be spread over several processes. Otherwise Transformers takes this PyTorch for
            one that was built without that, as long as the process lasts.
    """
    import transformers

    if "transformers.modeling_utils" in sys.modules or _DYNAMO in sys.modules:
        return transformers
    if not distributed:
        for module in (transformers.utils, transformers.utils.import_utils):
            vars(module)["is_torch_distributed_available"] = lambda: False
    with _read_once(), _dynamo_left_out():
        importlib.import_module("transformers.modeling_layers")
    return transformers


@contextmanager
def _read_once() -> Iterator[None]:
    """Transformers reads the files of all its models to learn what they define, and would now do that again."""
    import transformers
    from transformers.utils import import_utils as utils

    read, models = utils.define_import_structure, Path(transformers.__file__).parent / "models"

    def known(file: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(file).parent != models:
            return read(file, prefix)
        every = read(models, prefix="models")  # it keeps what it has read, with what lies beside the models
        mark = "models."
        return {
            backends: {name.removeprefix(mark): found[name] for name in found if name.startswith(mark)}
            for backends, found in every.items()
        }

    vars(utils)["define_import_structure"] = known
    try:
        yield
    finally:
        vars(utils)["define_import_structure"] = read


class _LeftOut(ModuleType):
    """Stands in for Dynamo while functions are decorated for it; for anything else, Dynamo is imported after all."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _remove(self)
        return getattr(importlib.import_module(_DYNAMO), name)

    @staticmethod
    def disable(
        function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any
    ) -> Callable[..., Any]:
        """As long as Dynamo is not imported, nothing of it need be disabled."""
        if function is None:
            return functools.partial(_LeftOut.disable, recursive=recursive, **options)

        @functools.wraps(function)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            if isinstance(sys.modules.get(_DYNAMO), (_LeftOut, type(None))):
                return function(*args, **kwargs)
            import torch

            return torch.compiler.disable(function, recursive, **options)(*args, **kwargs)  # type: ignore[no-untyped-call]

        return disabled

    @staticmethod
    def allow_in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo would look into it."""
        return function

    @staticmethod
    def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
        """What Dynamo does itself."""
        vars(function)["_dynamo_marked_constant"] = True
        return function


@contextmanager
def _dynamo_left_out() -> Iterator[None]:
    import torch

    left_out, found = _LeftOut(_DYNAMO), importlib.util.find_spec(_DYNAMO)
    if found is None:
        yield
        return
    left_out.__spec__, left_out.__path__ = found, list(found.submodule_search_locations or ())
    sys.modules[_DYNAMO] = vars(torch)["_dynamo"] = left_out
    try:
        yield
    finally:
        _remove(left_out)


def _remove(left_out: _LeftOut) -> None:
    import torch

    for table, name in ((sys.modules, _DYNAMO), (vars(torch), "_dynamo")):
        if table.get(name) is left_out:
            del table[name]
