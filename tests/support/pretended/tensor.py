"""`OnDevice`: a tensor that says ``cuda:0`` and lies on the CPU; and what becomes of the operations on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.pretended.journal import DeviceMixError, Journal

__all__ = ["CPU", "CUDA", "Dispatch", "OnDevice", "is_cuda", "unwrapped"]

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_A: Any = torch.ops.aten
_SIZES_FROM_VALUES = {
    _A.nonzero.default, _A.masked_select.default, _A.equal.default, _A._unique2.default, _A.unique_dim.default,
    _A.unique_consecutive.default, _A.repeat_interleave.Tensor, _A.bincount.default,
}  # fmt: skip
_INDEXED = {_A.index.Tensor, _A.index_put.default, _A.index_put_.default, _A._index_put_impl_.default}
_PINNING = (_A._pin_memory.default, _A.is_pinned.default)
_MASKS = (torch.bool, torch.uint8)


class OnDevice(torch.Tensor):
    """A tensor of a pretended device, whose values are `on_host`."""

    on_host: torch.Tensor
    journal: Journal
    _is_param: bool  # by which PyTorch knows parameters of such a type

    @staticmethod
    def __new__(cls, inner: torch.Tensor, journal: Journal) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=CPU, requires_grad=False,
        )  # fmt: skip
        made.on_host, made.journal = inner, journal
        if journal.recording is not None:
            journal.made.append(weakref.ref(made))
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"OnDevice({self.on_host!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as above
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        journal = next(value.journal for value in tree_leaves((args, kwargs)) if isinstance(value, OnDevice))
        return _run(journal, func, args, kwargs)


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees to it that tensors which are made on the device, or in pinned memory, are."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._journal = journal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        concerned = is_cuda(kwargs.get("device")) or kwargs.get("pin_memory") or func in _PINNING
        if concerned or any(isinstance(value, OnDevice) for value in tree_leaves((args, kwargs))):
            return _run(self._journal, func, args, kwargs)
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    """Whether it names a CUDA device."""
    return device is not None and torch.device(device).type == "cuda"


def unwrapped(value: Any) -> Any:
    """The values of a tensor of the device; anything else as it is."""
    return value.on_host if isinstance(value, OnDevice) else value


def _run(journal: Journal, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do `func` on the values, wrap what is on the device, and note what it would have cost."""
    if func is _A._to_copy.default and not isinstance(args[0], OnDevice):
        journal.copied_to_device(args[0], "copy", kwargs.get("non_blocking", False))
        return OnDevice(func(args[0], **{**kwargs, "device": CPU}).clone(), journal)
    if func is _A.copy_.default:
        return _copy(journal, *args, **kwargs)
    if func is _A.is_pinned.default:
        return journal.is_pinned(args[0])
    if func is _A._pin_memory.default:
        return journal.pin(args[0].clone())
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = [value for value in tensors if isinstance(value, OnDevice)]
    if there:
        _note_waits(journal, func, args)
        _check_devices(
            journal, func, args, [value for value in tensors if value.dim() and not isinstance(value, OnDevice)]
        )
    device, pinned = kwargs.get("device"), kwargs.get("pin_memory")
    inner_args, inner_kwargs = tree_map(unwrapped, args), tree_map(unwrapped, kwargs)
    if is_cuda(device):
        inner_kwargs["device"] = CPU
    if pinned:
        del inner_kwargs["pin_memory"]
    out = func(*inner_args, **inner_kwargs)
    if pinned:
        journal.pin(out)
    if not there and not is_cuda(device):
        return out
    return _wrapped(journal, func, args, kwargs, out, lambda: func(*inner_args, **inner_kwargs))


def _copy(journal: Journal, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to, of = unwrapped(target), unwrapped(source)
    if isinstance(target, OnDevice) and not isinstance(source, OnDevice) and source.dim():
        journal.copied_to_device(source, "copy_", non_blocking)

    def copy() -> None:
        if non_blocking and not isinstance(target, OnDevice):
            journal.send(to, of)
        else:
            to.copy_(of)

    copy()
    journal.launched(copy)
    if not isinstance(target, OnDevice):
        journal.copied_to_host(target, "copy_", non_blocking)
    return target


def _note_waits(journal: Journal, func: Any, args: Any) -> None:
    if func is _A._local_scalar_dense.default:
        journal.waited("item()")
    elif func in _SIZES_FROM_VALUES:
        journal.waited(func._schema.name)
    elif func in _INDEXED and (func is _A.index.Tensor or args[2].numel() != 1):
        by_mask = any(index is not None and index.dtype in _MASKS for index in args[1])
        if by_mask:
            journal.waited("index by a mask")


def _check_devices(journal: Journal, func: Any, args: Any, on_host: list[torch.Tensor]) -> None:
    """Only the indices of an indexed tensor may be on the host; the host waits for their copy."""
    if on_host and func in _INDEXED and isinstance(args[0], OnDevice):
        journal.waited("index on the host")
    elif on_host:
        shapes = [tuple(tensor.shape) for tensor in on_host]
        raise DeviceMixError(f"{func._schema.name}: tensors on cuda:0, and on cpu those of shapes {shapes}")


def _wrapped(journal: Journal, func: Any, args: Any, kwargs: dict[str, Any], out: Any, again: Callable[[], Any]) -> Any:
    """The result of an operation: what was written to as it was given, views, or new tensors."""
    schema = func._schema
    aliases = [returned.alias_info for returned in schema.returns]
    if aliases and aliases[0] is not None and aliases[0].is_write:
        journal.launched(again)
        passed = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        written = {
            frozenset(argument.alias_info.before_set): passed.get(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None
        }
        outputs = [written[frozenset(alias.before_set)] for alias in aliases]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    results = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
    if results and aliases[0] is None:

        def replay() -> None:
            for old, new in zip(results, tree_leaves(again()), strict=False):
                old.copy_(new)

        if not schema.name.startswith("aten::empty") and not schema.name.startswith("aten::new_empty"):
            journal.launched(replay)
    return tree_map(lambda value: OnDevice(value, journal) if isinstance(value, torch.Tensor) else value, out)
