"""`Trace`: the operations of one pass as PyTorch dispatches them, which can be run again, in another order or fused."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["VIEWS", "Op", "Trace", "UntraceableError", "Value", "run"]

_A: Any = torch.ops.aten
VIEWS = frozenset({
    _A.view.default, _A._unsafe_view.default, _A.transpose.int, _A.t.default, _A.permute.default, _A.expand.default,
    _A.unsqueeze.default, _A.slice.Tensor, _A.select.int, _A.alias.default, _A.detach.default,
    _A.split_with_sizes.default, _A.split.Tensor,
})  # fmt: skip
"""Operations that launch nothing: their results are other looks at what they read."""


class UntraceableError(Exception):
    """A pass does what its trace would not do again."""


class Value:
    """A tensor of a pass, as it was seen last; itself only if it is there before the pass."""

    __slots__ = ("dtype", "shape", "stride", "tensor")

    def __init__(self, seen: torch.Tensor, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self.see(seen)

    def see(self, seen: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tuple(seen.shape), tuple(seen.stride()), seen.dtype


@dataclass(eq=False, slots=True)
class Op:
    """An operation.

    Attributes:
        function: what is called, with `args` and `kwargs`, whose tensors are values.
        out: what it gives: values, in any structure.
        writes: whether it writes to what it is given.
        stores: whether it is a store of new KV, which nothing but `PagedAttention.run` reads.
    """

    function: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    writes: bool = False
    stores: bool = False

    @property
    def reads(self) -> list[Value]:
        return _values((self.args, self.kwargs))

    @property
    def made(self) -> list[Value]:
        return _values(self.out)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes what runs within, in this thread. It does nothing else: what runs gives what it always gives.

    Attributes:
        ops: in order.
        storing: whether what writes now stores KV, see `Op`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.ops: list[Op] = []
        self.storing = self._paused = False
        self._known: Any = WeakTensorKeyDictionary()  # of tensors their values
        self._views: dict[Any, Any] = {}  # by what was asked, so that equal views are one value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._paused:
            with self:  # what consists of other operations is seen as these
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if not self._paused:
            self._note(func, args, kwargs, out, func._schema.is_mutable)
        return out

    def call(self, function: Callable[..., None], *args: torch.Tensor) -> None:
        """Call `function`, which writes to its last tensor; it is one operation, whatever it does."""
        self._paused = True
        try:
            function(*args)
        finally:
            self._paused = False
        self._note(function, args, {}, (), True)

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor; one that is not known was there before."""
        if tensor not in self._known:
            self._known[tensor] = Value(tensor, tensor)
        found: Value = self._known[tensor]
        return found

    def _note(self, function: Any, args: Any, kwargs: dict[str, Any], out: Any, writes: bool) -> None:
        name = getattr(function, "_schema", None) and function._schema.name
        if name and "empty" in name:
            raise UntraceableError(f"{name}: who writes to it is not seen")
        if not all(isinstance(each, torch.Tensor) for each in tree_leaves(out)):
            raise UntraceableError(f"{name}: the host reads it")
        given: tuple[Any, dict[str, Any]] = tree_map(self._as_value, (args, kwargs))
        reads = _values(given)
        if function in VIEWS:
            if all(value.tensor is not None for value in reads):
                return  # of what is there before, and so it is there before, too
            asked = function, str(tree_map(lambda each: id(each) if isinstance(each, Value) else each, given))
            if asked in self._views:
                for tensor, value in zip(tree_leaves(out), self._views[asked].made, strict=True):
                    self._known[tensor] = value
                return
        made = tree_map(self._made, out)
        self.ops.append(Op(function, given[0], given[1], made, writes, writes and self.storing))
        if function in VIEWS:
            self._views[asked] = self.ops[-1]

    def _as_value(self, each: Any) -> Any:
        return self.value(each) if isinstance(each, torch.Tensor) else each

    def _made(self, each: torch.Tensor) -> Value:
        if each not in self._known:  # an operation that writes gives what it was given
            self._known[each] = Value(each)
        found: Value = self._known[each]
        return found


def run(ops: Seq[Op], results: Any, *, look: bool = False) -> Any:
    """Do `ops` in this order. Returns `results`, of any structure, with tensors in the place of values.

    `look` takes note of what results look like now.
    """
    last: dict[Value, int] = {value: place for place, op in enumerate(ops) for value in (*op.reads, *op.made)}
    ends: dict[int, list[Value]] = {}
    for value in last.keys() - {*_values(results)}:
        ends.setdefault(last[value], []).append(value)
    tensors: dict[Value, torch.Tensor] = {}

    def tensor(each: Any) -> Any:
        if not isinstance(each, Value):
            return each
        return tensors[each] if each.tensor is None else each.tensor

    for place, op in enumerate(ops):
        given = op.function(*tree_map(tensor, op.args), **tree_map(tensor, op.kwargs))
        for value, found in zip(op.made, tree_leaves(given), strict=False):
            if value.tensor is None:
                tensors[value] = found
                if look:
                    value.see(found)
        for value in ends.get(place, ()):
            tensors.pop(value, None)  # so that its memory is used again
    return tree_map(tensor, results)


def _values(tree: Any) -> list[Value]:
    return [each for each in tree_leaves(tree) if isinstance(each, Value)]
