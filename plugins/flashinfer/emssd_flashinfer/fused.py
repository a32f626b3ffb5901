"""Fewer launches in a recorded pass, and the same bits: pointwise operations fused, products of one input joined.

A pass is taken apart as PyTorch dispatches it, so no model is known by name. What is fused gives the same bits, as
every operation in a kernel rounds as it does alone, and sums stay PyTorch's own. That is seen once more when a pass is
recorded: what differs on the step at hand is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from emssd_flashinfer.kernel_source import can_be_fused, is_view
from emssd_flashinfer.recorded import Compute
from emssd_flashinfer.traced import Op, Trace, UntraceableError, Value, run

__all__ = ["Fusing", "Group"]

_LOG = logging.getLogger("emssd")
_A: Any = torch.ops.aten
_PRODUCTS = (_A.mm.default, _A.addmm.default)  # of an input and a weight, after a bias
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Group:
    """Operations that become one kernel.

    Attributes:
        ops: in order: pointwise ones, views of what they give, and stores of KV.
        inputs: what they read.
        outputs: what is read later; views aside.
    """

    ops: list[Op]
    inputs: list[Value]
    outputs: list[Value]


class Kernels(Protocol):
    """Makes kernels. They may round the operations `inexact` otherwise than PyTorch."""

    inexact: frozenset[Any]

    def prove(self, device: torch.device, dtype: torch.dtype) -> None:
        """See on `device`, before the first group, which operations are inexact."""

    def __call__(self, group: Group) -> Callable[..., None]:
        """The kernel of a group: given tensors for its inputs, and its outputs, it writes the latter."""


class Fusing:
    """Makes passes that launch less. Copies of weights, which become one product, may take `joined_bytes`."""

    def __init__(self, kernels: Kernels | None, joined_bytes: int) -> None:
        self._kernels, self._most = kernels, joined_bytes
        self.trace: Trace | None = None  # while a pass is taken apart
        self._weights: dict[tuple[int, ...], torch.Tensor] = {}

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take the device and the dtype of passes. Kernels that cannot be made there are not used."""
        try:
            if self._kernels is not None:
                self._kernels.prove(device, dtype)
        except Exception as error:  # Triton compiles here, which raises almost anything
            _LOG.warning("kernels are not fused: %s: %s", type(error).__name__, error)
            self._kernels = None

    def forget(self) -> None:
        """The model has changed."""
        self._weights.clear()

    def __call__(self, compute: Compute) -> Compute:
        """A function that does the same as `compute` with fewer launches, or `compute` itself."""
        self.trace = trace = Trace()
        try:
            with trace:
                expected = compute()
        except UntraceableError as error:
            _LOG.warning("a recorded pass is not fused: %s", error)
            return compute
        finally:
            self.trace = None
        results = tree_map(lambda each: trace.value(each) if isinstance(each, torch.Tensor) else each, expected)
        try:
            ops = self._fewer(trace.ops, results, expected)
        except Exception as error:  # as above
            _LOG.warning("a recorded pass is not fused: %s: %s", type(error).__name__, error)
            self.forget()
            return compute
        return lambda: run(ops, results)

    def _fewer(self, plain: list[Op], results: Any, expected: Any) -> list[Op]:
        """`plain` with fewer launches, and with the same bits on what is there now."""
        ops = joined(plain, self._joined_weight, self._most)
        seen = results, [op.args[3] for op in plain if op.stores]  # KV, too, which a later step may read
        if ops is not plain and not _same_bits(run(ops, seen, look=True), run(plain, seen)):
            _LOG.warning("linear layers of one input stay apart: one product rounds otherwise")
            run(plain, results, look=True)
            ops = plain
        if self._kernels is None:
            return ops
        fewer = fused(ops, results, self._kernels)
        if _same_bits(run(fewer, results), expected):
            return fewer
        _LOG.warning("a recorded pass is not fused: its kernels round otherwise")
        return ops

    def _joined_weight(self, weights: Seq[torch.Tensor]) -> torch.Tensor:
        key = tuple(each.data_ptr() for each in weights)
        if key not in self._weights:
            self._weights[key] = torch.cat([each.t() if each.dim() > 1 else each for each in weights])
        return self._weights[key]


def joined(ops: list[Op], weight_of: Callable[[Seq[torch.Tensor]], torch.Tensor], most: int) -> list[Op]:
    """`ops` with one product in the place of several that read the same; `ops` itself where there are none.

    `weight_of` gives ``[sum(out), in]`` of transposed weights ``[in, out]``, or ``[sum(out)]`` of biases. These take
    at most `most` bytes. Those come first that take the least for a launch.
    """
    groups: dict[tuple[Any, Value], list[Op]] = {}
    for op in ops:
        if op.function in _PRODUCTS and not op.kwargs:
            *bias, source, weight = op.args
            fixed = [each.tensor is not None for each in (*bias, weight)]
            if all(fixed) and source.tensor is None and weight.stride == (1, weight.shape[0]):
                groups.setdefault((op.function, source), []).append(op)
    several = sorted((group for group in groups.values() if len(group) > 1), key=_bytes_for_a_launch)
    firsts, others = dict[Op, list[Op]](), set[Op]()
    for group in several:
        most -= _bytes(group)
        if most < 0:
            break
        firsts[group[0]] = group
        others.update(group[1:])
    found: list[Op] = []
    for op in ops:
        if op in firsts:
            found += _one_product(firsts[op], weight_of)
        elif op not in others:
            found.append(op)
    return found if firsts else ops


def _one_product(group: list[Op], weight_of: Callable[[Seq[torch.Tensor]], torch.Tensor]) -> list[Op]:
    *bias, source, _ = group[0].args
    sizes = [op.out.shape[1] for op in group]
    biases = [weight_of([op.args[0].tensor for op in group])] if bias else []
    weight = weight_of([op.args[-1].tensor for op in group]).t()
    whole = Value(torch.empty(group[0].out.shape[0], sum(sizes), dtype=group[0].out.dtype, device="meta"))
    fixed = [Value(each, each) for each in (*biases, weight)]
    args = (*fixed[:-1], source, fixed[-1])
    parts = [op.out for op in group]
    return [
        Op(group[0].function, args, {}, whole),
        Op(_A.split_with_sizes.default, (whole, sizes, 1), {}, parts),
    ]


def _bytes(group: list[Op]) -> int:
    return sum(op.args[-1].tensor.numel() * op.args[-1].dtype.itemsize for op in group)


def _bytes_for_a_launch(group: list[Op]) -> float:
    return _bytes(group) / (len(group) - 1)


def fused(ops: Seq[Op], results: Any, kernels: Kernels) -> list[Op]:
    """`ops` with kernels in the place of pointwise operations. All that nothing else waits for become one launch."""
    kept = {each for each in tree_leaves(results) if isinstance(each, Value)}
    users: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.reads:
            users.setdefault(value, []).append(op)
    found: list[Op] = []
    waiting: list[Op] = []
    made: set[Value] = set()
    for op in ops:
        reads_waiting = not made.isdisjoint(op.reads)
        if (is_view(op) and reads_waiting) or can_be_fused(op, kernels.inexact):
            waiting.append(op)
            made.update(op.made)
            continue
        if op.writes or reads_waiting:
            found += _launched(waiting, users, kept, kernels)
            waiting, made = [], set()
        found.append(op)
    return found + _launched(waiting, users, kept, kernels)


def _launched(ops: list[Op], users: dict[Value, list[Op]], kept: set[Value], kernels: Kernels) -> list[Op]:
    """One launch that does `ops`, and then the views of what it gives that others read."""
    if sum(not is_view(op) for op in ops) < 2:
        return ops
    inside = {*ops}
    wanted = {
        value
        for op in ops
        for value in op.made
        if not op.stores and (value in kept or not inside.issuperset(users.get(value, ())))
    }
    views: list[Op] = []
    for op in reversed(ops):
        if is_view(op) and not wanted.isdisjoint(op.made):
            views.insert(0, op)
            wanted.update(op.reads)
    outputs = [value for op in ops if not is_view(op) and not op.stores for value in op.made if value in wanted]
    here = {value for op in ops for value in op.made if not op.stores}
    inputs = [*dict.fromkeys(value for op in ops for value in op.reads if value not in here)]
    group = Group(ops, inputs, outputs)
    kernel = kernels(group)

    def launch(*given: torch.Tensor) -> list[torch.Tensor]:
        device = given[0].device
        new = [torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=device) for each in outputs]
        kernel(*given, *new)
        return new

    return [Op(launch, tuple(inputs), {}, outputs), *views]


def _same_bits(found: Any, expected: Any) -> bool:
    """Here the host waits, once for each recording."""

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.dtype.is_floating_point:
            one, other = (each.contiguous().view(_INTEGERS[each.dtype.itemsize]) for each in (one, other))
        return bool(torch.equal(one, other))

    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(same(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor))
