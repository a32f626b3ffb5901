"""Modules that are listened to, or compute something else, in one thread and for one call: `Streams`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from emssd.errors import UnsupportedModelError

__all__ = ["Hidden", "Streams", "hear_input", "hear_output", "lock_of", "only_here", "replaced_forward", "stream_of"]

_LOCKS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
_MAKING = RLock()


def lock_of(model: torch.nn.Module) -> Any:
    """The lock that engines hold for a pass of `model`; one, however many engines there are."""
    with _MAKING:
        return _LOCKS.setdefault(model, RLock())


def only_here(function: Callable[..., Any], elsewhere: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """`function` in this thread. Other threads that call the same module get `elsewhere`, or nothing."""
    thread = get_ident()
    return lambda *args, **kwargs: (function if get_ident() == thread else elsewhere)(*args, **kwargs)


@contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within, `module` computes `forward` for this thread; afterwards what it computed before.

    The caller holds the lock of its model.
    """
    before = vars(module).get("forward")
    module.forward = only_here(forward, module.forward)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


NORMED = -1
"""The index of the last hidden state after the model's final norm."""

Hidden = dict[int, torch.Tensor]
"""Hidden states by index, see `Streams`."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The residual stream of a model between its decoder layers; `emssd.model.hf.find_streams` finds it.

    Index ``k`` is the stream in front of decoder layer ``k``: 0 is the input of the first layer, and ``n`` of ``n``
    layers is the output of the last one, before the final norm. `NORMED` comes out after that norm; ``hidden_states``
    of Transformers has it in the place of index ``n``.

    Attributes:
        decoder: the module that owns the layers.
        gives_more: whether a layer returns something beside the stream.
        changed: indices whose tensors the model writes to later in its pass.
        tail: the modules that make `NORMED` of index ``n``, in order; ``None`` if other code does.
        output_type: of `decoder`.
        ids: ``[n]`` tokens of a short pass.
        first: ``[1, n, width]`` index 0 in that pass.
    """

    name: str
    decoder: torch.nn.Module
    layers: Seq[torch.nn.Module]
    gives_more: bool
    changed: frozenset[int]
    tail: Seq[torch.nn.Module] | None
    output_type: type
    ids: torch.Tensor
    first: torch.Tensor

    def check(self, indices: Seq[int]) -> None:
        """Refuse indices that the model does not have. Raises UnsupportedModelError with the first of them."""
        last = len(self.layers)
        if beyond := [index for index in indices if not NORMED <= index <= last]:
            raise UnsupportedModelError(
                f"a drafter asks for hidden states {beyond[0]}, and {self.name} has {last} layers; choose 0 (what the "
                f"first layer gets) to {last} (what the last one gives), or {NORMED} (what the LM head is given)"
            )

    @contextmanager
    def taken(self, into: Hidden) -> Iterator[None]:
        """A pass of the model within this fills `into`, ``[b, n, width]`` for each index that is a key of it."""

        def take(index: int, output: Any) -> None:
            states = stream_of(output)
            into[index] = states.clone() if index in self.changed else states

        with ExitStack() as hooks:
            for index in into:
                if index == 0:
                    hooks.enter_context(hear_input(self.layers[0], partial(take, index)))
                else:
                    module = self.decoder if index == NORMED else self.layers[index - 1]
                    hooks.enter_context(hear_output(module, partial(take, index)))
            yield

    def check_cut(self) -> None:
        """Refuse a model that `cut` cannot end early."""
        if self.gives_more:
            raise UnsupportedModelError(
                f"{self.name} lends drafters no first layers: its layers give more than a residual stream"
            )

    @contextmanager
    def cut(self, num_layers: int) -> Iterator[None]:
        """A pass of the model within this ends early: layers after the first `num_layers` return their input."""
        with ExitStack() as cuts:
            for layer in self.layers[num_layers:]:
                cuts.enter_context(replaced_forward(layer, _handed_on))
            yield


def hear_input(module: torch.nn.Module, listener: Callable[[Any], None]) -> Any:
    """A hook of this thread: `listener` gets the residual stream that `module` is called with."""
    hook = only_here(lambda _, arguments, keywords: listener(_handed_on(*arguments, **keywords)))
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def hear_output(module: torch.nn.Module, listener: Callable[[Any], None]) -> Any:
    """A hook of this thread: `listener` gets the output of `module`."""
    return module.register_forward_hook(only_here(lambda module, arguments, output: listener(output)))


def stream_of(output: Any) -> torch.Tensor:
    """The residual stream in the output of a layer."""
    stream: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return stream


def _handed_on(*arguments: Any, **keywords: Any) -> torch.Tensor:
    """The residual stream that a layer is called with."""
    stream: torch.Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return stream
