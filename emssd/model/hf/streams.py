"""Modules that are listened to, or compute something else, in one thread and for the time of one call: `Streams`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from emssd.errors import UnsupportedModelError

__all__ = [
    "Hidden",
    "Streams",
    "hear_input",
    "hear_output",
    "lock_of",
    "only_here",
    "replaced_forward",
    "stream_of",
]

_LOCKS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
_MAKING = RLock()


def lock_of(model: torch.nn.Module) -> Any:
    """The lock that engines hold for a pass of `model`; one, however many engines there are."""
    with _MAKING:
        return _LOCKS.setdefault(model, RLock())


def only_here(function: Callable[..., Any], elsewhere: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """`function` in this thread, and `elsewhere` in others, which call the same modules; without, they do nothing."""
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
    """The places of a model where hidden states are taken; `emssd.model.hf.find_streams.find_streams` finds them.

    Index ``k`` is the residual stream in front of decoder layer ``k``: 0 is what the first layer gets, and ``n`` of
    ``n`` layers is what the last one gives, before the final norm. `NORMED` is what comes out after that norm.
    ``hidden_states`` of Transformers has it in the place of index ``n``.

    Attributes:
        decoder: the module that owns the layers.
        gives_more: whether a layer gives something beside the stream.
        changed: indices whose tensors the model writes to later in its pass.
        tail: the modules that make `NORMED` of index ``n``, in order; ``None`` if it is something else that does.
        output_type: what `decoder` returns.
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
                f"a drafter asks for hidden states {beyond[0]}, and {self.name} has {last} layers; choose "
                f"0 (what the first layer gets) to {last} (what the last one gives), or {NORMED} (what the "
                f"LM head is given)"
            )

    @contextmanager
    def taken(self, into: Hidden) -> Iterator[None]:
        """A pass of the model within this fills `into`, ``[b, n, width]``; its keys are the indices that are wanted."""

        def take(index: int) -> Callable[[Any], None]:
            def keep(output: Any) -> None:
                states = stream_of(output)
                into[index] = states.clone() if index in self.changed else states

            return keep

        with ExitStack() as hooks:
            for index in into:
                if index == 0:
                    hooks.enter_context(hear_input(self.layers[0], take(index)))
                else:
                    module = self.decoder if index == NORMED else self.layers[index - 1]
                    hooks.enter_context(hear_output(module, take(index)))
            yield

    def check_cut(self) -> None:
        """Refuse a model that `cut` cannot end early."""
        if self.gives_more:
            raise UnsupportedModelError(
                f"{self.name} lends drafters no first layers: its layers give more than a residual stream"
            )

    @contextmanager
    def cut(self, num_layers: int) -> Iterator[None]:
        """A pass of the model within this ends early: layers after the first `num_layers` hand on what they get."""
        with ExitStack() as cuts:
            for layer in self.layers[num_layers:]:
                cuts.enter_context(replaced_forward(layer, _handed_on))
            yield


def hear_input(module: torch.nn.Module, listener: Callable[[torch.Tensor], None]) -> Any:
    """A hook of this thread: `listener` gets the residual stream that `module` is called with."""

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        listener(_handed_on(*arguments, **keywords))

    return module.register_forward_pre_hook(only_here(hook), with_kwargs=True)


def hear_output(module: torch.nn.Module, listener: Callable[[Any], None]) -> Any:
    """A hook of this thread: `listener` gets what `module` gives."""

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        listener(output)

    return module.register_forward_hook(only_here(hook))


def stream_of(output: Any) -> torch.Tensor:
    """The residual stream among what a layer gives."""
    stream: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return stream


def _handed_on(*arguments: Any, **keywords: Any) -> torch.Tensor:
    """The residual stream that a layer is called with."""
    stream: torch.Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return stream
