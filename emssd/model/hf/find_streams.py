"""`find_streams`: the residual stream of a model, found by its structure and proved by a pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import ExitStack
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch

from emssd.errors import UnsupportedModelError
from emssd.model.hf.hooked import HookedModel
from emssd.model.hf.probe import ProbeRows, running
from emssd.model.hf.streams import Streams, hear_input, hear_output, only_here, stream_of

__all__ = ["find_streams"]


class _Noted(NamedTuple):
    """A tensor in a pass: the input or output of a layer, or the output of the decoder; and a copy as it was then."""

    is_input: bool
    layer: int
    kind: type
    states: torch.Tensor
    before: torch.Tensor


_Call = tuple[torch.nn.Module, torch.Tensor, torch.Tensor]
"""A module, its input and its output."""


def find_streams(target: HookedModel) -> Streams:
    """Run two short sequences, and see that the input of each layer is the output of the one before it."""
    decoder, layers = _decoder(target.model)
    rows, notes, outside, last = ProbeRows(target), list[_Noted](), list[_Call](), len(layers)

    def note(is_input: bool, index: int, value: Any) -> None:
        states = stream_of(value)
        notes.append(_Noted(is_input, index, type(value), states, states.clone()))

    def note_call(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if arguments and isinstance(output, torch.Tensor):
            outside.append((module, arguments[0], output))

    inside = {decoder}.union(*(layer.modules() for layer in layers))
    with ExitStack() as hooks, target.lock, running(target):
        for index, layer in enumerate(layers):
            hooks.enter_context(hear_input(layer, partial(note, True, index)))
            hooks.enter_context(hear_output(layer, partial(note, False, index)))
        hooks.enter_context(hear_output(decoder, partial(note, False, last)))
        for module in decoder.modules():
            if module not in inside:
                hooks.enter_context(module.register_forward_hook(only_here(note_call)))
        rows.run_packed(target, rows.attend)

    expected = [(is_input, index) for index in range(last) for is_input in (True, False)]
    if [noted[:2] for noted in notes] != [*expected, (False, last)]:
        raise _refused(target.model, "its layers do not run once each, one after another")
    for one, other in pairwise(notes[1:-1]):
        if not one.is_input and not torch.equal(one.before, other.before):
            raise _refused(target.model, f"layer {other.layer} is not given what layer {one.layer} gave")
    if any(noted.states.ndim != 3 or noted.states.shape[:2] != (1, rows.num_tokens) for noted in notes):
        raise _refused(target.model, "its layers hand on more than one residual stream")
    stream, end = [notes[0], *notes[1:-1:2]], notes[-1]
    return Streams(
        name=type(target.model).__name__,
        decoder=decoder,
        layers=layers,
        gives_more=not all(issubclass(noted.kind, torch.Tensor) for noted in stream[1:]),
        changed=frozenset(k for k, noted in enumerate(stream) if not torch.equal(noted.states, noted.before)),
        tail=_tail(outside, stream[-1].states, end.states),
        output_type=end.kind,
        ids=rows.tokens,
        first=notes[0].before,
    )


def _decoder(model: Any) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """The module that owns the decoder layers, and these: the ``k``-th of a list holds the attention of layer ``k``."""
    expected = model.config.get_text_config().num_hidden_layers

    def holds(layer: torch.nn.Module, index: int) -> bool:
        return any(getattr(module, "layer_idx", None) == index for module in layer.modules())

    lists = [
        (owner, [*child.children()])
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == expected and all(map(holds, child, count()))
    ]
    if len(lists) != 1:
        raise _refused(model, f"it has {len(lists)} lists of {expected} modules that could be its decoder layers")
    return lists[0]


def _refused(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} gives drafters no hidden states: {reason}")


def _tail(calls: Seq[_Call], start: torch.Tensor, end: torch.Tensor) -> list[torch.nn.Module] | None:
    """The chain of modules that leads from `start` to `end`; ``None`` if there is none."""
    tail, now = list[torch.nn.Module](), start
    for module, source, output in calls:
        if not _same(now, end) and _same(source, now):
            tail.append(module)
            now = output
    return tail if _same(now, end) else None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two living tensors are one, or the same elements in another shape."""
    return one is other or (one.data_ptr() == other.data_ptr() and one.numel() == other.numel())
