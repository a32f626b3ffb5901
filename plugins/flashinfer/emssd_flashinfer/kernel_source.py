"""The text of a kernel, in Triton's language, for pointwise operations that become one launch.

Each value is a function of an index. What is stored, in its own shape, is a stretch of the launch's programs; all that
it reads inside is computed at the index at hand. Values are in float32, rounded after each operation to their own type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from emssd_flashinfer.traced import Op, Value

__all__ = ["FUNCTIONS", "can_be_fused", "is_view", "kernel_source", "num_elements"]

_A: Any = torch.ops.aten
FUNCTIONS = {_A.silu.default: "tl.div_rn({0}, 1.0 + exp(-{0}))", _A.rsqrt.default: "rsqrt({0})"}
"""Operations whose last bit depends on who computes them."""

_POINTWISE = FUNCTIONS | {
    _A.add.Tensor: "({0} + {1})",
    _A.sub.Tensor: "({0} - {1})",
    _A.mul.Tensor: "({0} * {1})",
    _A.neg.default: "(-{0})",
    _A.relu.default: "tl.where({0} <= 0.0, 0.0, {0})",
    _A.nan_to_num.default: "tl.where(tl.abs({0}) < float('inf'), {0}, 0.0)",
    _A.pow.Tensor_Scalar: "({0} * {0})",
    _A._to_copy.default: "{0}",
    _A.clone.default: "{0}",
}
_NUMBERS = {_A.pow.Tensor_Scalar: [2], _A.nan_to_num.default: [0.0, 0.0, 0.0]}
"""The only numbers that these take here."""

_VIEWS = {
    _A.view.default, _A._unsafe_view.default, _A.transpose.int, _A.t.default, _A.expand.default, _A.unsqueeze.default,
    _A.slice.Tensor, _A.alias.default, _A.detach.default,
}  # fmt: skip
_TYPES = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_MOST_TO_CAT = 4


def is_view(op: Op) -> bool:
    """Whether it is a view that a kernel can look through."""
    return op.function in _VIEWS


def can_be_fused(op: Op, inexact: frozenset[Any]) -> bool:
    """Whether a kernel can do `op`, and rounds as it does."""
    values = [*op.reads, *op.made]
    if op.stores:  # ``pages.index_copy_(0, slots, new)``
        return op.function is _A.index_copy_.default and op.args[1] == 0 and op.args[0].dtype == op.args[3].dtype
    if op.writes or op.function in inexact or any(value.dtype not in _TYPES for value in values):
        return False
    if op.function is _A.cat.default:
        return len(op.args[0]) <= _MOST_TO_CAT and len({value.dtype for value in values}) == 1
    return _template(op) is not None and op.made[0].shape != ()


def _template(op: Op) -> str | None:
    """The formula of the result, with the operands in braces; ``None`` if it is not known to round like this."""
    if op.function not in _POINTWISE:
        return None
    numbers, kwargs, dtype = [each for each in op.args if not isinstance(each, Value)], op.kwargs, op.made[0].dtype
    if op.function is _A._to_copy.default:
        return "{0}" if kwargs.keys() == {"dtype"} else None
    if op.function is _A.clone.default:
        return "{0}"
    if any(value.dtype != dtype and dtype is not torch.float32 for value in op.reads):
        return None  # PyTorch rounds an operand first
    if (wanted := _NUMBERS.get(op.function)) is not None:
        return _POINTWISE[op.function] if numbers == wanted else None
    if op.function is _A.add.Tensor and kwargs == {"alpha": 0}:
        return "({0} + {1} * 0.0)"
    exact = all(dtype is torch.float32 or torch.tensor(each, dtype=dtype).item() == each for each in numbers)
    return None if kwargs or not exact else _POINTWISE[op.function]


def num_elements(outputs: Seq[Value], stores: Seq[Op]) -> list[int]:
    """Of each stretch of programs."""
    return [math.prod(shape) for shape, _ in _stretches(outputs, stores)]


def kernel_source(name: str, ops: Seq[Op], inputs: Seq[Value], outputs: Seq[Value]) -> str:
    """The function `name`: pointers to inputs and outputs, the elements of each stretch, and ``BLOCK`` of a program."""
    stores = [op for op in ops if op.stores]
    writer = _Writer(ops, inputs, outputs)
    stretches = _stretches(outputs, stores)
    lines, program = [], "program"
    for number, ((shape, stride), values) in enumerate(stretches.items()):
        lines += writer.stretch(number, program, shape, stride, values)
        lines.append(f"    program{number} = {program} - (n{number} + BLOCK - 1) // BLOCK")
        program = f"program{number}"
    pointers = [*(f"p{place}" for place in range(len(inputs))), *(f"q{place}" for place in range(len(outputs)))]
    given = ", ".join([*pointers, *(f"n{number}" for number in range(len(stretches))), "BLOCK: tl.constexpr"])
    return "\n".join([f"def {name}({given}):", "    program = tl.program_id(0)", *lines[:-1], ""])


_Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _stretches(outputs: Seq[Value], stores: Seq[Op]) -> dict[_Layout, list[Value | Op]]:
    """The stretches that are stored, by shape and strides."""
    found: dict[_Layout, list[Value | Op]] = {}
    every: list[Value | Op] = [*outputs, *stores]
    for each in every:
        value: Value = each.args[3] if isinstance(each, Op) else each
        found.setdefault((value.shape, value.stride), []).append(each)
    return found


class _Writer:
    """Writes the statements of one kernel."""

    def __init__(self, ops: Seq[Op], inputs: Seq[Value], outputs: Seq[Value]) -> None:
        self._inside = {value: op for op in ops if not op.stores for value in op.made}
        self._inputs = {value: f"p{place}" for place, value in enumerate(inputs)}
        self._outputs = {value: f"q{place}" for place, value in enumerate(outputs)}
        self._lines: list[str] = []
        self._done: dict[tuple[Value, tuple[str, ...], str], str] = {}

    def stretch(
        self, number: int, program: str, shape: Seq[int], stride: Seq[int], stored: Iterable[Value | Op]
    ) -> list[str]:
        """The programs that store what has this shape. They go through it in the order of memory."""
        self._lines, self._done = [], {}
        order = sorted((place for place, size in enumerate(shape) if size > 1), key=lambda place: -stride[place])
        places = _split("place", [shape[place] for place in order])
        at = ["0"] * len(shape)
        for place, text in zip(order, places, strict=True):
            at[place] = self._named(text)
        for each in stored:
            self._store(each, tuple(at))
        head = [
            f"    if ({program} >= 0) & ({program} < (n{number} + BLOCK - 1) // BLOCK):",
            f"        place = {program} * BLOCK + tl.arange(0, BLOCK)",
            f"        mask = place < n{number}",
        ]
        return [*head, *(f"        {line}" for line in self._lines)]

    def _store(self, each: Value | Op, at: tuple[str, ...]) -> None:
        if isinstance(each, Value):
            target, value, offset = self._outputs[each], each, _offset(at, each.stride)
        else:
            pages, _, slots, value = each.args
            target = self._inputs[pages]
            slot = self._named(f"tl.load({self._inputs[slots]} + {_offset(at[:1], slots.stride)}, mask)")
            offset = _offset((slot, *at[1:]), pages.stride)
        new = self._value(value, at, "mask")
        self._lines.append(f"tl.store({target} + {offset}, {new}.to({_TYPES[value.dtype]}), mask)")

    def _value(self, value: Value, at: tuple[str, ...], mask: str) -> str:
        """The name of `value` at an index."""
        at = tuple("0" if size == 1 else each for size, each in zip(value.shape, at, strict=True))
        if (key := (value, at, mask)) not in self._done:
            self._done[key] = self._named(self._text(value, at, mask))
        return self._done[key]

    def _text(self, value: Value, at: tuple[str, ...], mask: str) -> str:
        op = self._inside.get(value)
        if op is None:
            return f"tl.load({self._inputs[value]} + {_offset(at, value.stride)}, {mask}).to(tl.float32)"
        if is_view(op):
            return self._value(op.args[0], _before_view(op, value, at), mask)
        if op.function is _A.cat.default:
            return self._cat(op.args[0], (op.args[1] if len(op.args) > 1 else 0) % len(at), at, mask)
        operands = []
        for each in op.args:
            if isinstance(each, Value):
                operands.append(self._value(each, at[len(at) - len(each.shape) :], mask))
            elif isinstance(each, int | float):
                operands.append(repr(float(each)))
        template = _template(op)
        assert template is not None
        text = template.format(*operands)
        return text if value.dtype is torch.float32 else f"({text}).to({_TYPES[value.dtype]}).to(tl.float32)"

    def _cat(self, parts: Seq[Value], dim: int, at: tuple[str, ...], mask: str) -> str:
        ends = [sum(part.shape[dim] for part in parts[: number + 1]) for number in range(len(parts))]
        text = ""
        for part, end in zip(reversed(parts), reversed(ends), strict=True):
            start = end - part.shape[dim]
            own_mask = self._named(f"{mask} & ({at[dim]} >= {start}) & ({at[dim]} < {end})")
            own = self._value(part, (*at[:dim], self._named(f"{at[dim]} - {start}"), *at[dim + 1 :]), own_mask)
            text = f"tl.where({at[dim]} < {end}, {own}, {text})" if text else own
        return text

    def _named(self, text: str) -> str:
        """A name for it; equal ones have the same."""
        if text.isidentifier() or text.isdigit():
            return text
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        return name


def _before_view(op: Op, value: Value, at: tuple[str, ...]) -> tuple[str, ...]:
    """The place, in the tensor that the view looks at, of what the view has at `at`."""
    source, rest, found = op.args[0].shape, list[Any](op.args[1:]), [*at]
    if op.function in (_A.transpose.int, _A.t.default):
        one, other = (place % len(source) for place in (rest or range(len(source))))
        found[one], found[other] = found[other], found[one]
    elif op.function is _A.unsqueeze.default:
        del found[rest[0] % len(at)]
    elif op.function is _A.expand.default:
        found = found[len(at) - len(source) :]
    elif op.function is _A.slice.Tensor:
        dim, start, _, step = rest + [0, None, None, 1][len(rest) :]
        first = range(source[dim])[slice(start, None)].start
        found[dim] = f"({found[dim]} * {step} + {first})"
    elif op.function in (_A.view.default, _A._unsafe_view.default):
        large = [(size, each) for size, each in zip(value.shape, at, strict=True) if size > 1]
        sizes = [size for size in source if size > 1]
        if [size for size, _ in large] == sizes:
            left = [each for _, each in large]
        else:
            left = _split(_offset(at, _contiguous(value.shape)), sizes)
        found = [left.pop(0) if size > 1 else "0" for size in source]
    return tuple(found)


def _split(place: str, sizes: Seq[int]) -> list[str]:
    """A place as an index into a shape. The first axis has any size, so that a text is for any number of tokens."""
    found = []
    for number, (size, inner) in enumerate(zip(sizes, _contiguous(sizes), strict=True)):
        text = place if inner == 1 else f"({place}) // {inner}"
        found.append(text if number == 0 else f"({text}) % {size}")
    return found


def _contiguous(shape: Seq[int]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


def _offset(at: Seq[str], stride: Seq[int]) -> str:
    terms = [each if step == 1 else f"{each} * {step}" for each, step in zip(at, stride, strict=True) if each != "0"]
    # Of one place, too, it is a block: Triton takes a mask with nothing else.
    return "(" + " + ".join([*terms, "0 * place"]) + ")"
